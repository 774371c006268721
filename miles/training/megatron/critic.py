"""The critic of the Megatron backend: beside the policy on the same ranks, split in the same way."""

from __future__ import annotations

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel

from miles.arguments.megatron.settings import MegatronArguments
from miles.metrics import Metric
from miles.objective.settings import LossArguments
from miles.train_batch import TrainShard
from miles.training.megatron.optimizer import MegatronOptimizer
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.runner import forward_backward, values_of


class MegatronCritic:
    """``Critic`` (training/backend.py) for one rank. ``model`` holds a ``ValueModel``."""

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: MegatronOptimizer,
        loss: LossArguments,
        sizes: MegatronArguments,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.sizes = sizes
        self.ranks = ranks
        self.device = device

    def values(self, shard: TrainShard) -> list[np.ndarray]:
        return values_of(self.model.module, shard, self.ranks, self.device)

    def forward_backward(self, shard: TrainShard) -> dict[str, Metric]:
        return forward_backward(self.model, shard, self.loss, self.sizes, self.ranks, self.device)

    def optimizer_step(self) -> dict[str, Metric]:
        return self.optimizer.step()

    def skip_step(self) -> dict[str, Metric]:
        return self.optimizer.skip()
