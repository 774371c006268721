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
``--save-interval`` (with ``--save-hf`` and an export). The checkpoint comes after the log: a run that resumes from it
has every row of the steps before it. Without prompts (``--max-prompt-pass-rate``) the last iteration comes early.

A resumed run restores the trainer and the position in the prompts, then continues with the next iteration. Weights are
versioned by the number of iterations they were trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from miles.arguments.checkpoint import export_folder
from miles.metrics import Metric
from miles.tracking.phase_timer import PhaseTimer
from miles.tracking.tracker import Tracker
from miles.training.checkpoint_files import appearing_whole

if TYPE_CHECKING:  # the loop itself needs no Ray
    from miles.arguments.checkpoint import CheckpointArguments
    from miles.arguments.cluster import Offload
    from miles.arguments.evaluation import EvaluationArguments
    from miles.cluster.rollout_actor import GeneratedIteration, RolloutDriver
    from miles.cluster.stop_requests import StopRequests
    from miles.cluster.train_actor import TrainDriver

Metrics = dict[str, Metric]


def _show_nothing(phase: str | None) -> None:
    """Take the phases of a loop that nobody watches."""


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
    last_saved: int = 0  # iterations of the newest checkpoint of this run
    last_exported: int | None = None  # iterations of the newest export, if there is one
    on_phase: Callable[[str | None], None] = _show_nothing  # of ``PhaseTimer``
    timer: PhaseTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = PhaseTimer(self.on_phase)

    def run(self) -> None:
        """Run from the newest checkpoint of ``--load``, if any, to the last iteration."""
        done = self.resume()
        if done >= self.rollout.num_iterations > 0:
            print(
                f"note: {done} iterations are done already, and this run has {self.rollout.num_iterations}: "
                "nothing is left to train; give a larger --num-rollout or --num-epoch to continue"
            )
        self.sync_weights(version=done)
        if done == 0 and self.evaluation.has_sets and not self.evaluation.skip_eval_before_train:
            self.log(0, [self.evaluate()])
        last = max(done, self.rollout.num_iterations)
        for iteration in range(done, self.rollout.num_iterations):
            if not self.run_iteration(iteration):
                last = iteration
                self.end_early(last)
                break
            if self.stop.is_requested:
                self.save_before_stop(iteration + 1)
                self.stop.end_run()
        if self.checkpoint.save_hf is not None and self.last_exported != last:
            self.give_gpus_to_trainer()
            self.export_hf(last)

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
                steps = self.trainer.train(generated.shards_by_rank, iteration)
            self.sync_weights(version=done)
            steps[-1] |= generated.summary.metrics
            if self.evaluation.has_sets and self.is_due(self.evaluation.eval_interval, done):
                steps[-1] |= self.evaluate()
            self.log(iteration * self.steps_per_iteration + 1, steps)
            self.tracker.log_samples(done * self.steps_per_iteration, generated.summary.records)
            if self.checkpoint.save is not None and self.is_due(self.checkpoint.save_interval, done):
                self.save(done, exports=self.checkpoint.save_hf is not None)
        return True

    def end_early(self, done: int) -> None:
        """End a run whose prompts are all left out after ``done`` iterations: do what is due after the last one."""
        print(_no_prompts_left(done, self.rollout.num_iterations))
        with self.stop.finish_first():
            if done and self.evaluation.has_sets and not self.is_due(self.evaluation.eval_interval, done):
                self.tracker.log(done * self.steps_per_iteration, self.evaluate())
            if self.checkpoint.save is not None and done > self.last_saved:
                self.save(done, exports=self.checkpoint.save_hf is not None)

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
        return _is_due(interval, done, self.rollout.num_iterations)

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
        _add_times(steps[-1], self.timer, generated_during="generate" if self.is_synchronous else "step")
        for step, metrics in enumerate(steps, start=first_step):
            self.tracker.log(step, metrics)

    def save(self, done: int, exports: bool = False) -> None:
        """Write a checkpoint after ``done`` iterations, and with ``exports`` the Hugging Face export too."""
        self.give_gpus_to_trainer()
        with self.timer.phase("save"):
            state = {"rollouts_done": done, "prompts": self.rollout.state(done), "run": self.run_state}
            self.trainer.save(done, state)
            if exports:
                self.export_hf(done)
        self.last_saved = done
        if self.offload.train or self.offload.rollout:
            self.sync_weights(version=done)  # gives the engines their memory back

    def save_before_stop(self, done: int) -> None:
        """Save ``done`` iterations if they are not saved yet, before a signal ends the run.

        Not with engines or trainers that take turns on the GPUs: generation may be using the memory.
        """
        if self.checkpoint.save is None or done == self.last_saved or self.offload.train or self.offload.rollout:
            return
        self.save(done)

    def resume(self) -> int:
        """Load the newest checkpoint of ``--load`` and return the number of iterations already done."""
        state = self.trainer.resume()
        if state is None:
            return 0
        done: int = state["rollouts_done"]
        self.last_saved = done
        self.run_state = state.get("run", self.run_state)  # absent in checkpoints of earlier versions
        self.rollout.restore(state["prompts"])
        self.tracker.resume(done * self.steps_per_iteration + 1)
        return done

    def export_hf(self, done: int) -> None:
        """Write weights, configuration and tokenizer so that transformers' ``from_pretrained`` loads them."""
        assert self.checkpoint.save_hf is not None
        with appearing_whole(export_folder(self.checkpoint.save_hf, done).absolute()) as staged:
            self.trainer.export_hf(staged)
            self.rollout.save_tokenizer(staged)
        self.last_exported = done

    def give_gpus_to_trainer(self) -> None:
        """Under ``--colocate`` on GPUs, have the engines release their memory and the trainer take its own back."""
        if not (self.offload.rollout or self.offload.train):
            return
        with self.timer.phase("offload"):
            if self.offload.rollout:
                self.rollout.release_memory()
            if self.offload.train:
                self.trainer.onload()


@dataclass
class GenerationLoop:
    """Runs the iterations of ``--debug-rollout-only``: generate and evaluate, with the weights that engines start with.

    Each iteration has one row, at the step that would be the last of its training.
    """

    rollout: RolloutDriver
    tracker: Tracker
    evaluation: EvaluationArguments
    steps_per_iteration: int
    stop: StopRequests
    on_phase: Callable[[str | None], None] = _show_nothing  # of ``PhaseTimer``
    timer: PhaseTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = PhaseTimer(self.on_phase)

    def run(self) -> None:
        """Run from the first iteration to the last."""
        self.rollout.update_weights(None, 0)
        if self.evaluation.has_sets and not self.evaluation.skip_eval_before_train:
            self.log(0, self.rollout.evaluate())
        for iteration in range(self.rollout.num_iterations):
            if not self.run_iteration(iteration):
                print(_no_prompts_left(iteration, self.rollout.num_iterations))
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
        if self.evaluation.has_sets and _is_due(self.evaluation.eval_interval, done, self.rollout.num_iterations):
            with self.timer.phase("eval"):
                metrics |= self.rollout.evaluate()
        self.log(done * self.steps_per_iteration, metrics)
        self.tracker.log_samples(done * self.steps_per_iteration, generated.summary.records)
        return True

    def log(self, step: int, metrics: Metrics) -> None:
        """Log one row, with the seconds of the phases and the throughput."""
        _add_times(metrics, self.timer, generated_during="generate")
        self.tracker.log(step, metrics)


def _add_times(row: Metrics, timer: PhaseTimer, generated_during: str) -> None:
    """Add the seconds of the phases since the last row, and the tokens per second of the phase that generated them."""
    row |= {name: Metric(seconds) for name, seconds in timer.metrics().items()}
    if "rollout/tokens" in row:
        row["perf/tokens_per_second"] = Metric(row["rollout/tokens"].value, row[f"time/{generated_during}"].value)


def _no_prompts_left(done: int, num_iterations: int) -> str:
    return (
        f"note: every prompt has reached --max-prompt-pass-rate, so the run ends after {done} of {num_iterations} "
        "iterations; give harder prompts or a higher rate to continue"
    )


def _is_due(interval: int | None, done: int, num_iterations: int) -> bool:
    return done == num_iterations or (interval is not None and done % interval == 0)
