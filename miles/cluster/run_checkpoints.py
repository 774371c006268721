"""Checkpoints of trainer and prompts, and exports of the model, as the launcher sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles.arguments.checkpoint import export_folder
from miles.cluster.folders.best_checkpoint import BestCheckpoint, BestSoFar
from miles.metrics import Metric
from miles.training.checkpoint_files import appearing_whole

if TYPE_CHECKING:
    from miles.arguments.checkpoint import CheckpointArguments
    from miles.cluster.rollout_actor import RolloutDriver
    from miles.cluster.train_actor import TrainDriver


@dataclass
class RunCheckpoints:
    """Saves, exports and restores the trainer together with the position in the prompts.

    Checkpoints and exports are numbered by the iterations that are done.
    """

    rollout: RolloutDriver
    trainer: TrainDriver
    arguments: CheckpointArguments
    run_state: dict[str, str]  # saved in every checkpoint (cluster/folders/run_identity.py)
    last_saved: int = 0  # iterations of the newest checkpoint of this run
    last_exported: int | None = None  # iterations of the newest export, if there is one
    best: BestSoFar | None = None  # by the metric of --save-best, from the first iteration on

    def best_with(self, metrics: Mapping[str, Metric], done: int, due: bool) -> BestCheckpoint | None:
        """Return the record of ``done`` iterations with these metrics, if they are the best so far by ``--save-best``.

        ``due`` says whether a checkpoint is due anyway.
        """
        given = self.arguments
        if given.save is None or given.save_best is None:
            return None
        if self.best is None:
            self.best = BestSoFar(given.save_best, Path(given.save), self.last_saved)
        return self.best.improved_by(metrics, done, due)

    def save(self, done: int, best: BestCheckpoint | None = None) -> None:
        """Write a checkpoint after ``done`` iterations; ``best`` is its record if it is the best so far."""
        state = {"rollouts_done": done, "prompts": self.rollout.state(done), "run": self.run_state}
        self.trainer.save(done, state, best)
        self.last_saved = done

    def settle(self) -> None:
        """Wait for the checkpoint that is still being written (``--async-save``)."""
        if self.arguments.save is not None:
            self.trainer.settle_save()

    def end(self) -> None:
        """End the run: wait for the last checkpoint, and print a note if no iteration had the metric."""
        self.settle()
        if self.best is not None and not self.best.seen:
            print(f"note: --save-best {self.arguments.save_best}: no iteration had this metric, so no best was saved")

    def export(self, done: int) -> None:
        """Write weights, configuration and tokenizer so that transformers' ``from_pretrained`` loads them."""
        assert self.arguments.save_hf is not None
        with appearing_whole(export_folder(self.arguments.save_hf, done).absolute()) as staged:
            self.trainer.export_hf(staged)
            self.rollout.save_tokenizer(staged)
        self.last_exported = done

    def resume(self) -> int:
        """Load the newest checkpoint of ``--load``, if any, and return the number of iterations already done."""
        state = self.trainer.resume()
        if state is None:
            return 0
        self.last_saved = done = state["rollouts_done"]
        self.run_state = state.get("run", self.run_state)  # absent in checkpoints of earlier versions
        self.rollout.restore(state["prompts"])
        return int(done)
