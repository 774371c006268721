"""The main loop of a run: generate, train, sync weights, evaluate, log, save; repeat.

One iteration reads top to bottom in ``TrainingLoop.run_iteration``::

    generate(i) ─> train(i) ─> sync_weights(i+1) ─> evaluate? ─> log ─> save?
        │              │              │
     samples       optimizer      the engine generates iteration i+1
     and rewards   steps          with these weights

With ``--async-steps K`` the rollout process runs K iterations ahead: ``generate(i)`` returns an iteration that is
already made, or waits for it, and iterations i+1 to i+K are generated while iteration i trains (rollout/ordering.py has
the rule)::

    engine   │ generate 0 │ generate 1 │ generate 2 │ ...        (K = 1)
    trainer  │            │ train 0    │ train 1    │ ...

Due after an iteration, and always after the last one: evaluation every ``--eval-interval``, a checkpoint every
``--save-interval`` (with ``--save-hf`` and an export). ``--save-best`` also saves after each iteration that is the best
so far. A checkpoint follows the log: a run that resumes from it has every row of the steps before it. If no prompts are
left (``--max-prompt-pass-rate``), the run ends early.

A resumed run restores the trainer and the position in the prompts, then continues with the next iteration. Weights are
versioned by the number of iterations they were trained on. Engines and trainer that share GPUs take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any

from miles.observe.console import PhaseTimer
from miles.run.checkpoints import RunCheckpoints
from miles.tasks.data.stream import note_of_no_prompts
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.config.cluster import Offload
    from miles.config.evaluation import EvaluationArguments
    from miles.observe.tracker import Tracker
    from miles.run.one_process.drivers import OneProcessRollout, OneProcessTrainer
    from miles.run.rollout_actor import RolloutDriver
    from miles.run.stop_requests import StopRequests
    from miles.run.train_actor import TrainDriver


# The trainer and the engines of a run: weights go from one to the other, and both may share GPUs.
#
# Without ``--colocate`` on GPUs, each keeps its memory. With it, the two take turns, as ``Offload`` states::
#
#     engines generate ── give_gpus_to_trainer() ──> the trainer trains, saves ── sync_weights() ──> engines generate


@dataclass(frozen=True)
class Drivers:
    """Hands the trainer's weights to the engines, and shared GPUs from one to the other.

    Attributes:
        rollout: The engines, with the rollout process.
        trainer: The trainer's ranks.
        generates: Whether there are engines.
        offload: Whether engines or trainer leave the GPUs while the other one works.
        timer: Measures both.
    """

    rollout: RolloutDriver | OneProcessRollout
    trainer: TrainDriver | OneProcessTrainer
    generates: bool
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
            weights: Any = self.trainer.export_weights() if self.generates else None
            if self.offload.train:
                self.trainer.offload()
            self.rollout.update_weights(weights, version)


@dataclass
class TrainingLoop:
    """Runs the iterations of a training run and the tasks that are due between them."""

    drivers: Drivers  # the engines and the trainer
    checkpoints: RunCheckpoints
    tracker: Tracker
    _: KW_ONLY
    evaluation: EvaluationArguments
    steps_per_iteration: int
    is_synchronous: bool  # nothing is generated during a step
    stop: StopRequests
    profiled: Callable[[int], AbstractContextManager[object]] = nullcontext  # around an iteration
    # The foreseen values of the metrics that an iteration has measured, to be logged alongside them.
    foreseen: Callable[[Mapping[str, Metric]], dict[str, Metric]] = lambda _: {}

    def run(self) -> None:
        """Run from the newest checkpoint of ``--load``, if any, to the last iteration."""
        done = self.resume()
        last = self.drivers.rollout.num_iterations
        self.drivers.sync_weights(version=done)
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
                self.checkpoints.save_before_stop(done)
                self.stop.end_run()
        self.checkpoints.end(done)

    def resume(self) -> int:
        """Restore engines and trainer from ``--load`` and return the number of iterations already done."""
        if done := self.checkpoints.resume():
            self.tracker.resume(done * self.steps_per_iteration + 1, self.checkpoints.continued)
        return done

    def run_iteration(self, iteration: int) -> bool:
        """Generate, train, sync weights, and do the tasks due then; return false if no prompts were left for it."""
        done = iteration + 1
        try:
            with self.drivers.timer.phase("generate"):
                generated = self.drivers.rollout.generate(iteration)
        except KeyboardInterrupt:  # a signal abandons the samples
            self.checkpoints.save_before_stop(iteration)
            raise
        if generated is None:
            return False
        with self.stop.finish_first():
            self.drivers.give_gpus_to_trainer()
            with self.drivers.timer.phase("train"):
                trained = self.drivers.trainer.train(generated.shards_by_rank, iteration)
            self.drivers.sync_weights(version=done)
            row = trained.steps[-1]  # has the metrics that are measured once per iteration
            row |= generated.summary.metrics | self.drivers.rollout.weight_metrics
            row |= self.foreseen(row)
            if self.is_due(self.evaluation.eval_interval, done) and self.evaluation.has_sets:
                row |= self.evaluate()
            self.log(iteration * self.steps_per_iteration + 1, trained.steps)
            samples = generated.summary.samples.completed(trained.tokens)
            self.tracker.log_samples(done * self.steps_per_iteration, samples)
            self.checkpoints.save_if_due(done, row, self.is_due(self.checkpoints.arguments.save_interval, done))
        return True

    def end_early(self, done: int) -> None:
        """End a run whose prompts are all left out after ``done`` iterations: do the tasks due after the last one."""
        print(note_of_no_prompts(done, self.drivers.rollout.num_iterations))
        with self.stop.finish_first():
            row: dict[str, Metric] = {}
            if done and self.evaluation.has_sets and not self.is_due(self.evaluation.eval_interval, done):
                row = self.evaluate()
                self.checkpoints.before_writing()
                self.tracker.log(done * self.steps_per_iteration, row)
            self.checkpoints.save_if_due(done, row, due=True)
            self.tracker.end_early(done * self.steps_per_iteration)

    def is_due(self, interval: int | None, done: int) -> bool:
        """Return whether something is due after ``done`` iterations: every ``interval``, and after the last one."""
        return is_due_after(done, interval, self.drivers.rollout.num_iterations)

    def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of the held-out sets under the engine's weights."""
        with self.drivers.timer.phase("eval"):
            return self.drivers.rollout.evaluate()

    def log(self, first_step: int, rows: list[dict[str, Metric]]) -> None:
        """Log one row per optimizer step; the last row also gets the seconds of the phases and the throughput."""
        self.checkpoints.before_writing()
        # Overlapping generation runs during the whole step.
        self.drivers.timer.add_to(rows[-1], generated_during="generate" if self.is_synchronous else "step")
        for step, row in enumerate(rows, start=first_step):
            self.tracker.log(step, row)


def is_due_after(done: int, interval: int | None, num_iterations: int) -> bool:
    """Return whether an action that is due every ``interval`` iterations, and after the last, is due after ``done``."""
    return done == num_iterations or (interval is not None and done % interval == 0)


# The loop of ``--debug-rollout-only``: generate, evaluate, log; repeat. Nothing is trained.


@dataclass
class GenerationLoop:
    """Runs the iterations of ``--debug-rollout-only``: generate and evaluate, with the weights that engines start with.

    Each iteration has one row, at the step that would be the last of its training.
    """

    rollout: RolloutDriver | OneProcessRollout
    tracker: Tracker
    evaluation: EvaluationArguments
    steps_per_iteration: int
    stop: StopRequests
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    profiled: Callable[[int], AbstractContextManager[object]] = nullcontext  # around an iteration
    before_writing: Callable[[], None] = lambda: None  # raises if the folders are another launcher's by now

    def run(self) -> None:
        """Run from the first iteration to the last."""
        self.rollout.update_weights(None, 0)
        if self.evaluation.has_sets and not self.evaluation.skip_eval_before_train:
            self.log(0, self.rollout.evaluate())
        for iteration in range(self.rollout.num_iterations):
            with self.profiled(iteration):
                has_prompts = self.run_iteration(iteration)
            if not has_prompts:
                print(note_of_no_prompts(iteration, self.rollout.num_iterations))
                self.tracker.end_early(iteration * self.steps_per_iteration)
                break
            if self.stop.is_requested:
                self.stop.end_run()

    def run_iteration(self, iteration: int) -> bool:
        """Generate, evaluate if that is due, and log; return false if no prompts were left to generate from."""
        done = iteration + 1
        with self.timer.phase("generate"):
            generated = self.rollout.generate(iteration)
        if generated is None:
            return False
        self.rollout.update_weights(None, done)
        metrics = dict(generated.summary.metrics)
        if self.evaluation.has_sets and is_due_after(done, self.evaluation.eval_interval, self.rollout.num_iterations):
            with self.timer.phase("eval"):
                metrics |= self.rollout.evaluate()
        self.log(done * self.steps_per_iteration, metrics)
        self.tracker.log_samples(done * self.steps_per_iteration, generated.summary.samples.records)
        return True

    def log(self, step: int, metrics: dict[str, Metric]) -> None:
        """Log one row, with the seconds of the phases and the throughput."""
        self.before_writing()
        self.timer.add_to(metrics, generated_during="generate")
        self.tracker.log(step, metrics)
