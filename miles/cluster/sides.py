"""The two sides of a run, trainer and engines: weights go from one to the other, and both may share GPUs.

Without ``--colocate`` on GPUs, each side keeps its memory. With it, the sides take turns, as ``Offload`` says::

    engines generate ── give_gpus_to_trainer() ──> the trainer trains, saves ── sync_weights() ──> engines generate
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.tracking.phase_timer import PhaseTimer

if TYPE_CHECKING:
    from miles.arguments.cluster import Offload
    from miles.cluster.rollout_actor import RolloutDriver
    from miles.cluster.train_actor import TrainDriver


@dataclass(frozen=True)
class Sides:
    """Hands the trainer's weights to the engines, and shared GPUs from one side to the other.

    Attributes:
        rollout: The engines' side.
        trainer: The other one.
        offload: Which sides leave the GPUs while the other one works.
        timer: Measures both.
    """

    rollout: RolloutDriver
    trainer: TrainDriver
    offload: Offload
    timer: PhaseTimer

    @property
    def take_turns(self) -> bool:
        """Whether a side leaves the GPUs while the other one works."""
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
