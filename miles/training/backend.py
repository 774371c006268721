"""The verbs behind which a training framework stands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist

from miles.metrics import Metric
from miles.train_batch import TrainShard
from miles.weights import WeightChunk


class Critic(Protocol):
    """One rank of the critic: the same layout of ranks as the policy's, weights and an optimizer of its own."""

    def values(self, shard: TrainShard) -> list[np.ndarray]:
        """The value of the state in which each response token is chosen, one float32 [response] a sample."""
        ...

    def forward_backward(self, shard: TrainShard) -> dict[str, Metric]:
        """As the policy's, of the value loss; the shard has ``values`` and ``returns``."""
        ...

    def optimizer_step(self) -> dict[str, Metric]:
        """As the policy's."""
        ...

    def skip_step(self) -> dict[str, Metric]:
        """As the policy's."""
        ...


class TrainBackend(Protocol):
    """One rank of a trainer. All verbs are collective: every rank calls them in the same order."""

    @property
    def critic(self) -> Critic | None:
        """With ``--advantage-estimator ppo``; it stands on the same ranks, and is trained on the same shards."""
        ...

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the tokens of a step between them, in the order of its shards; None is all ranks."""
        ...

    def forward_backward(self, shard: TrainShard) -> dict[str, Metric]:
        """Accumulate the step's gradient (a plain sum over micro-batches and ranks); metrics reduced over all ranks."""
        ...

    def optimizer_step(self) -> dict[str, Metric]:
        """Clip, update, advance the schedule, clear the gradients. Returns grad_norm and lr."""
        ...

    def skip_step(self) -> dict[str, Metric]:
        """Instead of ``optimizer_step`` where the step has no loss token: weights and schedule stay as they are."""
        ...

    def log_probs(self, shard: TrainShard, reference: bool = False) -> list[np.ndarray]:
        """Log-probs of each sample's response tokens, float32 [response], under current or reference weights."""
        ...

    def export_weights(self) -> Iterator[WeightChunk]:
        """Full tensors under Hugging Face names, in buckets, in the compute dtype; every rank iterates to the end."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer to host memory, and free the GPU's. No other verb may follow but ``onload``."""
        ...

    def onload(self) -> None:
        """Move them back."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write a folder that transformers' ``from_pretrained`` loads (the tokenizer is the launcher's to add)."""
        ...

    def save(self, folder: Path, state: dict[str, Any]) -> None:
        """Write model, optimizer, schedule, random state and ``state`` (the launcher's own) into ``folder``.

        With a critic, its model, optimizer and schedule as well.
        """
        ...

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True) -> dict[str, Any]:
        """Read what ``save`` wrote; returns ``state``."""
        ...
