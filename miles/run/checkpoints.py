"""Checkpoints of trainer and prompts, and exports of the model, as the launcher sees them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from miles.base.disk_faults import naming_disk
from miles.base.flags import count
from miles.base.storage import is_url
from miles.base.text import tell
from miles.base.threads import start_in_thread
from miles.config.checkpoint import checkpoint_name
from miles.config.rollout import path_of_iteration
from miles.observe.run_files import RunIdentity
from miles.run.best_checkpoint import BestCheckpoint, BestSoFar
from miles.run.resume import KEY as SETTINGS
from miles.training import checkpoint_files
from miles.training.checkpoint_files import appearing_whole
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.config.checkpoint import CheckpointArguments
    from miles.run.loop import Drivers

# In the launcher's part of a checkpoint.
WANDB_RUN = "wandb_run"
STEPS_PER_ITERATION = "steps_per_iteration"
LONG_SAVE_SECONDS = 2.0  # a line reports a longer one


def saved_wandb_run(checkpoint: CheckpointArguments) -> str | None:
    """Return the id of the W&B run that a run from the checkpoint in ``--load`` continues; None if it begins a new one.

    It is of the same run: ``--finetune`` begins another.
    """
    _, state = _continued(checkpoint)
    saved = state.get(WANDB_RUN)
    return saved if isinstance(saved, str) else None


def check_same_steps(checkpoint: CheckpointArguments, steps_per_iteration: int) -> None:
    """Check that the run takes as many optimizer steps per iteration as the one in ``--load``, if it continues that.

    Rows of ``metrics.jsonl`` and the position in the decay of the learning rate are counted in steps.

    Raises:
        ValueError: It takes more or fewer.
    """
    name, state = _continued(checkpoint)
    saved = state.get(STEPS_PER_ITERATION, steps_per_iteration)  # earlier versions did not save it
    if saved != steps_per_iteration:
        raise ValueError(
            f"--load {checkpoint.load}: {name} is of a run of {count(saved, 'optimizer step')} per iteration, "
            f"and this one takes {steps_per_iteration}, so neither its metrics nor its learning rate could continue; "
            "give --rollout-batch-size, --n-samples-per-prompt, --global-batch-size and --ppo-epochs of that run, or "
            "begin a new run from its weights with --finetune"
        )


def note_of_nothing_left(done: int, last: int) -> str:
    """Return the line that a run prints whose ``last`` iteration was done before."""
    return (
        f"note: {done} iterations are done already, and this run has {last}: nothing is left to train; give a larger "
        "--num-rollout or --num-epoch to continue"
    )


def _continued(checkpoint: CheckpointArguments) -> tuple[str, dict[str, Any]]:
    """Return the name and the launcher's part of the checkpoint that the run continues; both empty without one."""
    if checkpoint.load is None or checkpoint.finetune:
        return "", {}
    folder = checkpoint_files.at(checkpoint.local(checkpoint.load))
    return ("", {}) if folder is None else (folder.name, checkpoint_files.read_launcher_state(folder))


@dataclass
class RunCheckpoints:
    """Saves, exports and restores the trainer together with the position in the prompts.

    Checkpoints and exports are numbered by the iterations that are done.
    """

    drivers: Drivers
    arguments: CheckpointArguments
    run_state: dict[str, str]  # saved in every checkpoint (run/resume.py)
    steps_per_iteration: int  # saved too
    wandb_run: str | None = None  # the id of the W&B run, saved too
    before_writing: Callable[[], None] = lambda: None  # raises if the folders are another launcher's by now
    last_saved: int = 0  # iterations of the newest checkpoint of this run
    last_exported: int | None = None  # iterations of the newest export, if there is one
    continued: RunIdentity | None = None  # the run that the checkpoint of --load is of; None if it does not say
    best: BestSoFar | None = None  # by the metric of --save-best, from the first iteration on
    settings: Mapping[str, Any] = field(default_factory=dict)  # saved too (run/resume.py)
    branch: str | None = None  # the checkpoint in --load that a new run begins from (run/resume.py)

    def resume(self) -> int:
        """Load the newest checkpoint of ``--load``, if any, and return the number of iterations already done."""
        state = self.drivers.trainer.resume()
        if state is None:
            return 0
        self.last_saved = done = int(state["rollouts_done"])
        is_branch = self.branch is not None and self.branch == self.arguments.load
        self.continued = RunIdentity.from_state({"run": self.run_state} if is_branch else state)
        if self.continued is not None:
            self.run_state = self.continued.to_state()
        if self.wandb_run is None and not is_branch:
            self.wandb_run = state.get(WANDB_RUN)  # a later run with --use-wandb continues it
        self.drivers.rollout.restore(state["prompts"])
        last = self.drivers.rollout.num_iterations
        if done >= last > 0:
            print(note_of_nothing_left(done, last))
        return done

    def save_if_due(self, done: int, metrics: Mapping[str, Metric], due: bool) -> None:
        """Write a checkpoint and an export if they are due, or if the iteration is the best by ``--save-best``.

        One that is there already is written again if it turns out to be the best: saving records that.

        Args:
            done: The iterations that are done.
            metrics: The metrics of the last one; empty if nothing was measured.
            due: Whether a checkpoint is due after it.
        """
        best = self._best_with(metrics, done, due)
        if (due and self._lacks_checkpoint(done)) or best is not None:
            self._save(done, best, exports=self._lacks_export(done))

    def save_before_stop(self, done: int) -> None:
        """Save ``done`` iterations if they are not saved yet, before a signal ends the run, or name what is saved.

        Not with engines or trainers that take turns on the GPUs: generation may be using the memory.
        """
        if self._lacks_checkpoint(done) and not self.drivers.take_turns:
            tell(f"saving a checkpoint after {count(done, 'iteration')}")
            self._save(done)
        elif self.arguments.save is not None:
            with suppress(OSError):  # the last line of the run reports it
                if (saved := checkpoint_files.newest(self.arguments.local(self.arguments.save))) is not None:
                    tell(f"{self.arguments.save}/{saved.name} is saved")
        self._settle()

    def end(self, done: int) -> None:
        """End the run: export, wait for the last checkpoint, and print a note if no iteration had the metric."""
        if self._lacks_export(done):
            self.drivers.give_gpus_to_trainer()
            self._export(done)
        with self.drivers.timer.phase("save"):
            self._settle()
        if self.best is not None and not self.best.seen:
            print(f"note: --save-best {self.arguments.save_best}: no iteration had this metric, so no best was saved")

    def _best_with(self, metrics: Mapping[str, Metric], done: int, due: bool) -> BestCheckpoint | None:
        """Return the record of ``done`` iterations, if these metrics are the best so far by ``--save-best``."""
        arguments = self.arguments
        if arguments.save is None or arguments.save_best is None or not metrics:
            return None
        if self.best is None:
            self.best = BestSoFar(arguments.save_best, arguments.local(arguments.save), self.last_saved)
        return self.best.improved_by(metrics, done, due)

    def _lacks_checkpoint(self, done: int) -> bool:
        return self.arguments.save is not None and done > self.last_saved

    def _lacks_export(self, done: int) -> bool:
        return self.arguments.save_hf is not None and done != self.last_exported

    def _save(self, done: int, best: BestCheckpoint | None = None, exports: bool = False) -> None:
        """Write a checkpoint; ``best`` is its record if it is the best so far."""
        self.before_writing()
        self.drivers.give_gpus_to_trainer()
        with self.drivers.timer.phase("save"):
            state = {"rollouts_done": done, "prompts": self.drivers.rollout.state(done), "run": self.run_state}
            state |= {STEPS_PER_ITERATION: self.steps_per_iteration, SETTINGS: dict(self.settings)}
            if self.wandb_run is not None:
                state[WANDB_RUN] = self.wandb_run
            began = time.monotonic()
            self.drivers.trainer.save(done, state, best)
            if (seconds := time.monotonic() - began) > LONG_SAVE_SECONDS:
                print(f"saved {self.arguments.save}/{checkpoint_name(done)} in {seconds:.0f} s", flush=True)
            self.last_saved = done
            if exports:
                self._export(done)
        if self.drivers.take_turns:
            self.drivers.sync_weights(version=done)  # gives the engines their memory back

    def _export(self, done: int) -> None:
        """Write weights, configuration and tokenizer so that transformers' ``from_pretrained`` loads them."""
        assert self.arguments.save_hf is not None
        self.before_writing()
        name = path_of_iteration(self.arguments.save_hf, done)
        folder = self.arguments.local(name) / checkpoint_name(done) if is_url(name) else Path(name)
        what = f"--save-hf {self.arguments.save_hf}: the export"
        with (
            naming_disk(folder, what=what, then="earlier checkpoints are intact"),
            appearing_whole(folder.absolute()) as staged,
        ):
            self.drivers.trainer.export_hf(staged)
            self.drivers.rollout.save_tokenizer(staged)
        if is_url(name):
            self.drivers.trainer.upload_export(folder, name)
        self.last_exported = done

    def _settle(self) -> None:
        """Wait for the checkpoint that is still being written (``--async-save``), and for uploads."""
        if self.arguments.save is not None:
            self.drivers.trainer.settle_save()
        if self.arguments.urls:
            self.drivers.trainer.settle_uploads()


# A checkpoint whose files the trainer's ranks write during training (``--async-save``).
#
# Each rank has copied its part into memory, and a thread of the rank writes it. A thread of the launcher waits for all
# ranks, and publishes the checkpoint when the last file is on the disk.


class BackgroundSave(Future[None]):
    """Waits for the ranks in a thread, then calls ``publish`` with their results, and ends as that does.

    Args:
        calls: One per rank; each returns when the rank has written its files.
        publish: Makes the checkpoint appear.
        naming: Makes the context for both, which can name the disk in an error.
    """

    def __init__(
        self,
        calls: Sequence[ray.ObjectRef[Any]],
        publish: Callable[[list[Any]], None],
        naming: Callable[[], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self.calls = list(calls)

        def run() -> None:
            try:
                with naming():
                    publish(ray.get(self.calls))
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(None)

        start_in_thread(run)
