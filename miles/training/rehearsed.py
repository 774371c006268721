"""A backend without weights, for ``miles/rehearsal``: its methods beyond the protocol of backends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from miles.config.components import build_rehearsal, train_backend_spec
from miles.config.settings import Settings
from miles.training.backend import TrainBackend
from miles.types.train_batch import TrainShard

LeaveOut: TypeAlias = Callable[[Sequence[nn.Module]], Collection[int]]
"""Is given layers that run one after another, and returns the places of those that passes need not run."""


class RehearsedBackend(TrainBackend, Protocol):
    """One rank, built as for training. It reads no weights, and no value of a tensor.

    Attributes:
        reducing: Entered while gradients are reduced once per step, apart from the passes over micro-batches.
        starting: Called when the forward pass of a micro-batch starts, where several can be in flight.
        reads_on_host: Whether a whole model is in the host's memory only, and its parts move to the device.
    """

    reads_on_host: bool
    reducing: Callable[[], AbstractContextManager[None]]
    starting: Callable[[], None]

    def weights(self) -> Iterator[torch.Tensor]:
        """Yield what holds the weights that the models compute with."""
        ...

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield what holds gradients between the passes of a step and its optimizer."""
        ...

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        """Yield moments and master weights, as far as they exist."""
        ...

    @property
    def vocabulary(self) -> int:
        """The width of this rank's logits."""
        ...

    def expect(self, shard: TrainShard) -> None:
        """Prepare to run ``shard``, whose micro-batches are all alike."""
        ...

    def hold_gradients(self, model: Any) -> None:
        """Allocate for ``model`` what a micro-batch leaves: gradients that are missing, without computing them."""
        ...

    def allocate_states(self, model: Any) -> None:
        """Allocate what the optimizer of ``model`` keeps between steps."""
        ...

    def traced_micro_batches(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches must run to include every operation."""
        ...

    def micro_batches_in_flight(self, micro_batches: int) -> int:
        """Return the number of a step's micro-batches whose activations this rank holds at once."""
        ...


def build_rehearsed(
    settings: Settings, total_steps: int, leave_out: LeaveOut, imbalance: float = 1.0
) -> AbstractContextManager[RehearsedBackend]:
    """Build this rank of the backend that ``--train-backend`` names, under fake tensors on the host.

    Args:
        settings: All sections of the run.
        total_steps: Its optimizer steps.
        leave_out: Called with the layers of each part of each model, unless all of them must run. A layer that
            is left out has its weights, gradients and optimizer states all the same.
        imbalance: How many times the average load the experts of this rank have. Which experts a token is routed to
            is not known without weights.

    Raises:
        ValueError: The backend refuses the model, or cannot be rehearsed with a flag.
    """
    spec = train_backend_spec(settings.training.train_backend)
    built: AbstractContextManager[RehearsedBackend] = build_rehearsal(
        spec, settings, torch.device("cpu"), total_steps, leave_out, imbalance
    )
    return built
