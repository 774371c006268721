"""The trainer and the engines of a run: weights go from one to the other, and both may share GPUs.

Without ``--colocate`` on GPUs, each keeps its memory. With it, the two take turns, as ``Offload`` states::

    engines generate ── give_gpus_to_trainer() ──> the trainer trains, saves ── sync_weights() ──> engines generate
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles.observe.console import PhaseTimer
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.config.cluster import Offload
    from miles.run.folders.best_checkpoint import BestCheckpoint
    from miles.run.rollout_actor import GeneratedIteration
    from miles.run.train_actor import TrainedIteration


class RolloutSide(Protocol):
    """The calls that the loop and the checkpoints make on the engines. ``RolloutDriver`` describes each call."""

    num_iterations: int
    weight_metrics: dict[str, Metric]

    def generate(self, iteration: int) -> GeneratedIteration | None: ...  # noqa: D102
    def evaluate(self) -> dict[str, Metric]: ...  # noqa: D102
    def update_weights(self, weights: Any, version: int) -> None: ...  # noqa: D102
    def release_memory(self) -> None: ...  # noqa: D102
    def state(self, iterations_done: int) -> dict[str, Any]: ...  # noqa: D102
    def restore(self, state: dict[str, Any]) -> None: ...  # noqa: D102
    def save_tokenizer(self, folder: Path) -> None: ...  # noqa: D102


class TrainerSide(Protocol):
    """The calls that the loop and the checkpoints make on the trainer. ``TrainDriver`` describes each call."""

    def train(self, shards_by_token_rank: list[Any], iteration: int) -> TrainedIteration: ...  # noqa: D102
    def export_weights(self) -> Any: ...  # noqa: D102
    def offload(self) -> None: ...  # noqa: D102
    def onload(self) -> None: ...  # noqa: D102
    def save(self, iterations_done: int, state: dict[str, Any], best: BestCheckpoint | None = None) -> None: ...  # noqa: D102
    def settle_save(self) -> None: ...  # noqa: D102
    def resume(self) -> dict[str, Any] | None: ...  # noqa: D102
    def export_hf(self, folder: Path) -> None: ...  # noqa: D102
    def upload_export(self, folder: Path, url: str) -> None: ...  # noqa: D102
    def settle_uploads(self) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Sides:
    """Hands the trainer's weights to the engines, and shared GPUs from one to the other.

    Attributes:
        rollout: The engines, with the rollout process.
        trainer: The trainer's ranks.
        offload: Whether engines or trainer leave the GPUs while the other one works.
        timer: Measures both.
    """

    rollout: RolloutSide
    trainer: TrainerSide
    offload: Offload
    timer: PhaseTimer

    @property
    def take_turns(self) -> bool:
        """Whether engines or trainer leave the GPUs while the other one works."""
        return self.offload.train or self.offload.rollout

    def give_gpus_to_trainer(self) -> None:
        """Have the engines release their memory and the trainer take its own back, if they take turns."""
        if not self.take_turns:
            return
        with self.timer.phase("offload"):
            if self.offload.rollout:
                self.rollout.release_memory()
            if self.offload.train:
                self.trainer.onload()

    def sync_weights(self, version: int) -> None:
        """Give the engines the trainer's weights, and with them the memory that they had released.

        Args:
            version: The number of iterations that the weights were trained on.
        """
        with self.timer.phase("sync_weights"):
            weights = self.trainer.export_weights()
            if self.offload.train:
                self.trainer.offload()
            self.rollout.update_weights(weights, version)
