"""What a run saves, as seen from the launcher: checkpoints of both sides, and exports of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.arguments.checkpoint import export_folder
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

    def save(self, done: int) -> None:
        """Write a checkpoint after ``done`` iterations."""
        state = {"rollouts_done": done, "prompts": self.rollout.state(done), "run": self.run_state}
        self.trainer.save(done, state)
        self.last_saved = done

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
