"""The loop of ``--debug-rollout-only``: generate, evaluate, log; repeat. Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miles.observe.console import PhaseTimer
from miles.run.loop import is_due_after
from miles.tasks.data.stream import note_of_no_prompts
from miles.types.metrics import Metric

if TYPE_CHECKING:  # the loop itself needs no Ray
    from miles.config.evaluation import EvaluationArguments
    from miles.observe.tracker import Tracker
    from miles.run.sides import RolloutSide
    from miles.run.stop_requests import StopRequests


@dataclass
class GenerationLoop:
    """Runs the iterations of ``--debug-rollout-only``: generate and evaluate, with the weights that engines start with.

    Each iteration has one row, at the step that would be the last of its training.
    """

    rollout: RolloutSide
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
