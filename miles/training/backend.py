"""The seam between the trainer and a training framework: what FSDP and Megatron implement, each for one rank.

A step is written once, in trainer.py and scoring.py. A backend runs micro-batches, reduces sums, shards,
exports, saves and loads. The loop over micro-batches is the backend's, because Megatron's schedule owns it::

    trainer, scoring ── function per micro-batch ──> TrainedModel.forward_backward, ScoredModel.forward
                     <── its results, on the last pipeline stage ──

Every method is collective: every rank calls it, in the same order.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from miles.config.components import call
from miles.config.settings import Settings
from miles.objective.output import LossOutput, PolicyScores
from miles.training.checkpoint_io import StagedFiles
from miles.training.optimizer import ScheduledOptimizer
from miles.types.metrics import Metric
from miles.types.train_batch import MicroBatch, MicroBatchPlan, TrainShard
from miles.types.weights import WeightChunk


class PolicyScorer(Protocol):
    """A language model's forward pass over one micro-batch, or the end of it. Call it once."""

    def __call__(self, with_entropy: bool, sharpness: float = 1.0) -> PolicyScores:
        """Compute log-probs, and the entropy if asked; of logits that are multiplied by ``sharpness``."""


ValueScorer: TypeAlias = Callable[[], torch.Tensor]
"""The same of a critic: returns the value of the state where each response token is chosen, fp32 [R]."""

Scorer = TypeVar("Scorer")  # PolicyScorer or ValueScorer
Scorer_co = TypeVar("Scorer_co", covariant=True)
Result = TypeVar("Result")
LossFunction: TypeAlias = Callable[[MicroBatch, Scorer], LossOutput]


@dataclass(frozen=True)
class StepSums:
    """The results of the passes over a step's micro-batches, besides the gradient."""

    metrics: list[dict[str, torch.Tensor]]  # ``LossOutput.metrics`` per micro-batch; on the last pipeline stage only
    inside_model: dict[str, Metric] = field(default_factory=dict)  # of losses inside the model; the step's, everywhere


class ScoredModel(Protocol[Scorer_co]):
    """A model that is read and not trained here: reference, teacher, or policy and critic while they are scored."""

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer_co], Result]
    ) -> list[Result]:
        """Run the micro-batches ``plans`` of ``shard`` forward, without a graph.

        Returns what ``function`` makes of each, in order, on the last pipeline stage; an empty list on the others.
        """


class TrainedModel(ScoredModel[Scorer_co], Protocol[Scorer_co]):
    """A model that learns: the policy, or the critic."""

    @property
    def optimizer(self) -> ScheduledOptimizer:
        """Its optimizer."""

    def forward_backward(self, shard: TrainShard, loss_function: LossFunction[Scorer_co]) -> StepSums:
        """Accumulate the step's gradient, the plain sum of ``LossOutput.loss`` over micro-batches and ranks.

        ``shard.score_only`` is run as well, forward only, for its metrics.
        """

    def take_loss_mass(self) -> torch.Tensor | None:
        """Return this rank's part of the canary's gradient, fp32 scalar, and clear it.

        The sum over ranks is the loss mass. Neither norm nor optimizer may see this gradient. None, on all ranks alike,
        if the canary was in no graph of this step.
        """


class TrainBackend(Protocol):
    """One rank of a trainer. ``miles/config/components.py`` lists the implementations."""

    @property
    def policy(self) -> TrainedModel[PolicyScorer]:
        """The model that the engine generates with."""

    @property
    def critic(self) -> TrainedModel[ValueScorer] | None:
        """The value model, if the objective has one. It is on the same ranks as the policy, and split alike."""

    @property
    def reference(self) -> ScoredModel[PolicyScorer] | None:
        """The frozen model that a KL is measured to, if the objective reads one."""

    @property
    def teacher(self) -> ScoredModel[PolicyScorer] | None:
        """The frozen model that is distilled, if the trainer holds it."""

    @property
    def token_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the tokens of a step between them, in the order of its shards; None is all ranks."""

    def sum_over_ranks(self, sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Add up scalars over the ranks that hold different tokens; the same names and numbers on every rank.

        ``sums`` has the same names in the same order on all ranks of the last pipeline stage; others' are not read.
        """

    def from_last_stage(self, columns: list[np.ndarray], lengths: Sequence[int]) -> list[np.ndarray]:
        """Return on every pipeline stage the ``columns`` of the last; ``lengths`` are theirs, known on all stages."""

    def export_weights(self) -> Iterator[WeightChunk]:
        """Yield full tensors under Hugging Face names, in chunks, in compute dtype; every rank iterates to the end."""

    def offload(self) -> None:
        """Move weights and optimizer to host memory, and free the GPU's. Only ``onload`` may follow."""

    def onload(self) -> None:
        """Move them back."""

    def refresh_reference(self) -> None:
        """Let the reference follow the policy (training/scoring.py); under --ref-update-interval only."""

    def export_hf(self, folder: Path) -> None:
        """Write a folder that transformers' ``from_pretrained`` loads; the tokenizer is the launcher's to add."""

    def save(self, folder: Path, state: dict[str, Any], staged: StagedFiles | None = None) -> None:
        """Write models, optimizers, schedules, random state and ``state`` (the launcher's own) into ``folder``.

        Tensors go into ``staged`` if it is given, for the caller to write.
        """

    def load(self, folder: Path, optimizer: bool = True, rng: bool = True, reference: bool = True) -> dict[str, Any]:
        """Read what ``save`` wrote; returns ``state``.

        Without ``reference``, one that follows the policy starts again, at ``--ref-load``.
        """


def build_backend(settings: Settings, device: torch.device, total_steps: int) -> TrainBackend:
    """Build this rank of the backend that ``--train-backend`` names. Collective; the process group is initialized.

    Args:
        settings: All sections of the run.
        device: Where this rank computes.
        total_steps: Optimizer steps of the run, over which the learning rates decay.

    Raises:
        ValueError: If no backend has this name, or the backend refuses the settings.
    """
    spec = settings.backend
    backend: TrainBackend = call(spec.builder, settings, device, total_steps)
    return backend


# A backend without weights, for ``miles/commands/rehearsal``: its methods beyond the protocol of backends.


LeaveOut: TypeAlias = Callable[[Sequence[nn.Module]], Collection[int]]
"""Is given layers that run one after another, and returns the indices of the layers that passes need not run."""


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

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield what holds gradients between the passes of a step and its optimizer."""

    def optimizer_states(self) -> Iterator[torch.Tensor]:
        """Yield moments and master weights, as far as they exist."""

    @property
    def vocabulary(self) -> int:
        """The width of this rank's logits."""

    def expect(self, shard: TrainShard) -> None:
        """Prepare to run ``shard``, whose micro-batches are all alike."""

    def hold_gradients(self, model: Any) -> None:
        """Allocate the gradients of ``model`` that are missing, as a micro-batch would, without computing them."""

    def allocate_states(self, model: Any) -> None:
        """Allocate the state that the optimizer of ``model`` keeps between steps."""

    def traced_micro_batches(self, micro_batches: int) -> int:
        """Return how many of a step's micro-batches must run to include every operation."""

    def micro_batches_in_flight(self, micro_batches: int) -> int:
        """Return the number of a step's micro-batches whose activations this rank holds at once."""


def build_rehearsed(
    settings: Settings, total_steps: int, leave_out: LeaveOut, imbalance: float = 1.0
) -> AbstractContextManager[RehearsedBackend]:
    """Build this rank of the backend that ``--train-backend`` names, under fake tensors on the host.

    Args:
        settings: All sections of the run.
        total_steps: Its optimizer steps.
        leave_out: Called with the layers of each part of each model, unless all of them must run. A layer that is left
            out still has its weights, gradients and optimizer states.
        imbalance: How many times the average load the experts of this rank have. Which experts a token is routed to
            is not known without weights.

    Raises:
        ValueError: The backend refuses the model, or cannot be rehearsed with a flag.
    """
    spec = settings.backend
    built: AbstractContextManager[RehearsedBackend] = call(
        spec.rehearsal, settings, torch.device("cpu"), total_steps, leave_out, imbalance
    )
    return built
