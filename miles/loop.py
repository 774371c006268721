"""The main loop of a run: generate, train, sync weights, evaluate, log, save; repeat.

One iteration reads top to bottom in ``TrainingLoop.run_iteration``::

    generate(i) ─> train(i) ─> sync_weights(i+1) ─> evaluate? ─> log ─> save?
        │              │              │
     samples       optimizer      the engine generates iteration i+1
     and rewards   steps          with these weights

With ``--async-steps K`` the rollout side runs K iterations ahead: ``generate(i)`` returns what it has already made, or
waits for it, and iterations i+1 to i+K are generated while iteration i trains (rollout/ordering.py has the rule)::

    engine   │ generate 0 │ generate 1 │ generate 2 │ ...        (K = 1)
    trainer  │            │ train 0    │ train 1    │ ...

Due after an iteration, and always after the last one: evaluation every ``--eval-interval``, a checkpoint every
``--save-interval`` (with ``--save-hf`` and an export). ``--save-best`` also saves after each iteration that is the best
so far. A checkpoint follows the log: a run that resumes from it has every row of the steps before it. If no prompts are
left (``--max-prompt-pass-rate``), the run ends early.

A resumed run restores the trainer and the position in the prompts, then continues with the next iteration. Weights are
versioned by the number of iterations they were trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from miles.cluster.run_checkpoints import RunCheckpoints
from miles.metrics import Metric
from miles.tracking.phase_timer import PhaseTimer
from miles.tracking.tracker import Tracker

if TYPE_CHECKING:  # the loop itself needs no Ray
    from miles.arguments.checkpoint import CheckpointArguments
    from miles.arguments.cluster import Offload
    from miles.arguments.evaluation import EvaluationArguments
    from miles.cluster.folders.best_checkpoint import BestCheckpoint
    from miles.cluster.rollout_actor import GeneratedIteration, RolloutDriver
    from miles.cluster.stop_requests import StopRequests
    from miles.cluster.train_actor import TrainDriver

Metrics = dict[str, Metric]


def show_nothing(phase: str | None) -> None:
    """Take the phases of a loop that nobody watches."""


def not_profiled(iteration: int) -> AbstractContextManager[None]:
    """Record nothing of an iteration."""
    return nullcontext()


@dataclass
class TrainingLoop:
    """Runs the iterations of a training run and what is due between them."""

    rollout: RolloutDriver
    trainer: TrainDriver
    tracker: Tracker
    _: KW_ONLY
    evaluation: EvaluationArguments
    checkpoint: CheckpointArguments
    offload: Offload  # which sides leave the GPUs while the other one works
    steps_per_iteration: int
    is_synchronous: bool  # nothing is generated during a step
    run_state: dict[str, str]  # saved in every checkpoint (cluster/folders/run_identity.py)
    stop: StopRequests
    on_phase: Callable[[str | None], None] = show_nothing  # of ``PhaseTimer``
    profiled: Callable[[int], AbstractContextManager[None]] = not_profiled  # around an iteration
    timer: PhaseTimer = field(init=False)
    run_checkpoints: RunCheckpoints = field(init=False)

    def __post_init__(self) -> None:
        self.timer = PhaseTimer(self.on_phase)
        self.run_checkpoints = RunCheckpoints(self.rollout, self.trainer, self.checkpoint, self.run_state)

    def run(self) -> None:
        """Run from the newest checkpoint of ``--load``, if any, to the last iteration."""
        done, last = self.resume(), self.rollout.num_iterations
        if done >= last > 0:
            print(
                f"note: {done} iterations are done already, and this run has {last}: nothing is left to train; "
                "give a larger --num-rollout or --num-epoch to continue"
            )
        self.sync_weights(version=done)
        if done == 0 and self.evaluation.has_sets and not self.evaluation.skip_eval_before_train:
            self.log(0, [self.evaluate()])
        while done < last:
            with self.profiled(done):
                has_prompts = self.run_iteration(done)
            if not has_prompts:
                self.end_early(done)
                break
            done += 1
            if self.stop.is_requested:
                self.save_before_stop(done)
                self.stop.end_run()
        if self.checkpoint.save_hf is not None and self.run_checkpoints.last_exported != done:
            self.give_gpus_to_trainer()
            self.run_checkpoints.export(done)
        with self.timer.phase("save"):
            self.run_checkpoints.end()

    def run_iteration(self, iteration: int) -> bool:
        """Generate, train, sync weights, and do what is due afterwards; return false if no prompts were left for it."""
        done = iteration + 1
        with self.timer.phase("generate"):
            generated = self.generate(iteration)
        if generated is None:
            return False
        with self.stop.finish_first():
            self.give_gpus_to_trainer()
            with self.timer.phase("train"):
                trained = self.trainer.train(generated.shards_by_rank, iteration)
            steps = trained.steps
            self.sync_weights(version=done)
            steps[-1] |= generated.summary.metrics
            if self.evaluation.has_sets and self.is_due(self.evaluation.eval_interval, done):
                steps[-1] |= self.evaluate()
            self.log(iteration * self.steps_per_iteration + 1, steps)
            samples = generated.summary.samples.completed(trained.tokens)
            self.tracker.log_samples(done * self.steps_per_iteration, samples)
            if self.checkpoint.save is not None:
                due = self.is_due(self.checkpoint.save_interval, done)
                best = self.run_checkpoints.best_with(steps[-1], done, due)
                if due or best is not None:
                    self.save(done, exports=self.checkpoint.save_hf is not None, best=best)
        return True

    def end_early(self, done: int) -> None:
        """End a run whose prompts are all left out after ``done`` iterations: do what is due after the last one."""
        print(no_prompts_left(done, self.rollout.num_iterations))
        with self.stop.finish_first():
            best = None
            if done and self.evaluation.has_sets and not self.is_due(self.evaluation.eval_interval, done):
                metrics = self.evaluate()
                self.tracker.log(done * self.steps_per_iteration, metrics)
                best = self.run_checkpoints.best_with(metrics, done, due=True)
            # One that is there already is written again if it turns out to be the best: saving notes it.
            if self.checkpoint.save is not None and (done > self.run_checkpoints.last_saved or best is not None):
                exports = self.checkpoint.save_hf is not None and self.run_checkpoints.last_exported != done
                self.save(done, exports, best)
            self.tracker.end_early(done * self.steps_per_iteration)

    def generate(self, iteration: int) -> GeneratedIteration | None:
        """Wait for the samples of an iteration; a signal abandons them, and what was trained before is saved.

        None if too few prompts are left for one.
        """
        try:
            return self.rollout.generate(iteration)
        except KeyboardInterrupt:
            self.save_before_stop(iteration)
            raise

    def is_due(self, interval: int | None, done: int) -> bool:
        """Return whether something is due after ``done`` iterations: every ``interval``, and after the last one."""
        return is_due_after(done, interval, self.rollout.num_iterations)

    def sync_weights(self, version: int) -> None:
        """Give the engine the trainer's weights; ``version`` is the number of iterations they were trained on."""
        with self.timer.phase("sync_weights"):
            weights = self.trainer.export_weights()
            if self.offload.train:
                self.trainer.offload()
            self.rollout.update_weights(weights, version)

    def evaluate(self) -> Metrics:
        """Return the metrics of the held-out sets under the engine's weights."""
        with self.timer.phase("eval"):
            return self.rollout.evaluate()

    def log(self, first_step: int, steps: list[Metrics]) -> None:
        """Log one row per optimizer step; the last row also gets the seconds of the phases and the throughput."""
        # Overlapping generation runs during the whole step.
        add_times(steps[-1], self.timer, generated_during="generate" if self.is_synchronous else "step")
        for step, metrics in enumerate(steps, start=first_step):
            self.tracker.log(step, metrics)

    def save(self, done: int, exports: bool = False, best: BestCheckpoint | None = None) -> None:
        """Write a checkpoint after ``done`` iterations, and with ``exports`` the Hugging Face export too.

        ``best`` is its record for ``--save-best``, if it is the best so far.
        """
        self.give_gpus_to_trainer()
        with self.timer.phase("save"):
            self.run_checkpoints.save(done, best)
            if exports:
                self.run_checkpoints.export(done)
        if self.offload.train or self.offload.rollout:
            self.sync_weights(version=done)  # gives the engines their memory back

    def save_before_stop(self, done: int) -> None:
        """Save ``done`` iterations if they are not saved yet, before a signal ends the run.

        Not with engines or trainers that take turns on the GPUs: generation may be using the memory.
        """
        takes_turns = self.offload.train or self.offload.rollout
        if self.checkpoint.save is not None and done != self.run_checkpoints.last_saved and not takes_turns:
            self.save(done)
        self.run_checkpoints.settle()

    def resume(self) -> int:
        """Restore both sides from ``--load`` and return the number of iterations already done."""
        if done := self.run_checkpoints.resume():
            self.tracker.resume(done * self.steps_per_iteration + 1)
        return done

    def give_gpus_to_trainer(self) -> None:
        """Under ``--colocate`` on GPUs, have the engines release their memory and the trainer take its own back."""
        if not (self.offload.rollout or self.offload.train):
            return
        with self.timer.phase("offload"):
            if self.offload.rollout:
                self.rollout.release_memory()
            if self.offload.train:
                self.trainer.onload()


def add_times(row: Metrics, timer: PhaseTimer, generated_during: str) -> None:
    """Add the seconds of the phases since the last row, and the tokens per second of the phase that generated them."""
    row |= {name: Metric(seconds) for name, seconds in timer.metrics().items()}
    if "rollout/tokens" in row:
        row["perf/tokens_per_second"] = Metric(row["rollout/tokens"].value, row[f"time/{generated_during}"].value)


def no_prompts_left(done: int, num_iterations: int) -> str:
    """Return the note of a run that ends early."""
    return (
        f"note: every prompt has reached --max-prompt-pass-rate, so the run ends after {done} of {num_iterations} "
        "iterations; give harder prompts or a higher rate to continue"
    )


def is_due_after(done: int, interval: int | None, num_iterations: int) -> bool:
    """Return whether an action that is due every ``interval`` iterations, and after the last, is due after ``done``."""
    return done == num_iterations or (interval is not None and done % interval == 0)
