"""Train a language model by reinforcement learning: ``python train.py --flags…`` (``--help`` lists them).

parse -> validate -> place -> loop (generate, train, sync weights, save, evaluate).
"""

from __future__ import annotations

import sys
from pathlib import Path

from miles.arguments.explain import objective_formula, objective_in_words
from miles.arguments.parser import main_parse
from miles.arguments.settings import Settings
from miles.metrics import Metric


def main(argv: list[str]) -> None:
    """Run the command line; wrong flags exit with 2 before anything starts, failures of the run with 1."""
    validated = main_parse(argv)
    from miles.cluster.failures import exit_with_message  # Ray and torch are imported from here on
    from miles.objective.hooks import check_custom_reducer

    with exit_with_message(validated.settings.checkpoint):
        check_custom_reducer(validated.settings.loss)
        for note in validated.notes:
            print(f"note: {note}")
        run(validated.settings)


def run(settings: Settings) -> None:
    """Start Ray, train, and stop what was started; ``--max-restarts`` times again if a worker process fails."""
    from miles.cluster.restarts import with_restarts
    from miles.cluster.session import EngineLayout, ray_session

    engines = EngineLayout(settings.num_engines, settings.sglang.rollout_num_gpus_per_engine)
    with ray_session(settings.cluster, engines) as placement:
        with_restarts(settings, lambda settings: train(settings, placement))


def train(settings: Settings, placement) -> None:  # type: ignore[no-untyped-def]
    """Start the actors and train for ``--num-rollout`` rollouts, from the newest checkpoint of ``--load`` if any."""
    from miles.arguments.offload_rules import offload_on
    from miles.cluster.liveness import Workers
    from miles.cluster.rollout_driver import RolloutDriver
    from miles.cluster.train_driver import TrainDriver
    from miles.tracking.run_header import RunHeader
    from miles.tracking.tracker import Tracker

    offload = offload_on(settings, placement.device)
    workers = Workers(settings.cluster.worker_timeout)
    with RolloutDriver(settings, placement, workers) as rollout:
        if offload.rollout:
            rollout.release_memory()  # the trainer is built in it
        total_steps = rollout.num_iterations * settings.steps_per_iteration
        header = RunHeader.from_sections(
            "miles", settings, objective_in_words(settings), objective_formula(settings), total_steps
        )
        with (
            TrainDriver(settings, placement, workers, total_steps) as trainer,
            Tracker(settings.tracking, header) as tracker,
        ):
            Loop(settings, rollout, trainer, tracker, offload).run()


class Loop:
    """Generate, train, sync weights, save, evaluate; repeat."""

    def __init__(self, settings, rollout, trainer, tracker, offload) -> None:  # type: ignore[no-untyped-def]
        from miles.tracking.phase_timer import PhaseTimer

        self.settings = settings
        self.rollout = rollout
        self.trainer = trainer
        self.tracker = tracker
        self.offload = offload
        self.num_iterations = rollout.num_iterations
        self.timer = PhaseTimer()

    def run(self) -> None:
        """From the newest checkpoint of ``--load``, if any, to the last rollout."""
        done = self.resume()
        self.sync_weights(done)
        if done == 0 and self.settings.evaluation.has_sets and not self.settings.evaluation.skip_eval_before_train:
            self.log(0, [self.evaluate()])
        for iteration in range(done, self.num_iterations):
            self.train_one(iteration)
        if self.settings.checkpoint.save_hf is not None:
            self.lend_gpus_to_trainer()
            self.export_hf(Path(self.settings.checkpoint.save_hf))

    def train_one(self, iteration: int) -> None:
        """One rollout, its optimizer steps, and what falls due after it.

        With ``--async-steps`` the rollout was begun earlier, and those after it are generated while this one trains.
        """
        with self.timer.phase("generate"):
            generated = self.rollout.generate(iteration)
        self.lend_gpus_to_trainer()
        with self.timer.phase("train"):
            steps = self.trainer.train(generated.shards_by_rank, iteration)
        done = iteration + 1
        self.sync_weights(done)
        steps[-1] |= generated.metrics
        if self.settings.evaluation.has_sets and self.due(self.settings.evaluation.eval_interval, done):
            steps[-1] |= self.evaluate()
        self.log(self.steps_done(iteration) + 1, steps)
        self.tracker.log_samples(self.steps_done(done), generated.records())
        # After the rows of its steps: wherever a kill comes, a run that resumes the checkpoint has them all.
        if self.due(self.settings.checkpoint.save_interval, done) and self.settings.checkpoint.save is not None:
            self.save(done)

    def save(self, done: int) -> None:
        """A checkpoint of ``done`` rollouts, for which the trainer must be on its GPUs."""
        self.lend_gpus_to_trainer()
        with self.timer.phase("save"):
            self.trainer.save(done, {"rollouts_done": done, "prompts": self.rollout.state(done)})
        if self.offload.train or self.offload.rollout:
            self.sync_weights(done)  # which gives the engines their memory back

    def lend_gpus_to_trainer(self) -> None:
        """Under ``--colocate`` on GPUs: the engines give their memory up, and the trainer comes back."""
        if not (self.offload.rollout or self.offload.train):
            return
        with self.timer.phase("offload"):
            if self.offload.rollout:
                self.rollout.release_memory()
            if self.offload.train:
                self.trainer.onload()

    def due(self, interval: int | None, done: int) -> bool:
        """Every ``interval`` rollouts, and after the last."""
        return done == self.num_iterations or (interval is not None and done % interval == 0)

    def steps_done(self, rollouts: int) -> int:
        """Optimizer steps that ``rollouts`` rollouts make: the ``step`` of metrics.jsonl."""
        return rollouts * self.settings.steps_per_iteration

    def evaluate(self) -> dict[str, Metric]:
        """Metrics of the held-out sets under the engine's weights."""
        with self.timer.phase("eval"):
            return self.rollout.evaluate()

    def sync_weights(self, version: int) -> None:
        """The engine's weights become the trainer's; ``version`` counts the rollouts trained on."""
        with self.timer.phase("sync_weights"):
            exported = self.trainer.export_weights()
            if self.offload.train:
                self.trainer.offload()
            self.rollout.update_weights(exported, version)

    def log(self, first_step: int, steps: list[dict[str, Metric]]) -> None:
        """One row a step; the seconds of the phases stand in the last."""
        steps[-1] |= {name: Metric(seconds) for name, seconds in self.timer.metrics().items()}
        steps[-1] |= throughput(steps[-1], synchronous=self.settings.rollout.async_steps == 0)
        for step, metrics in enumerate(steps, start=first_step):
            self.tracker.log(step, metrics)

    def resume(self) -> int:
        """Load the newest checkpoint of ``--load``; returns the rollouts already done."""
        state = self.trainer.resume()
        if state is None:
            return 0
        self.rollout.restore(state["prompts"])
        self.tracker.resume(self.steps_done(state["rollouts_done"]) + 1)
        return state["rollouts_done"]

    def export_hf(self, folder: Path) -> None:
        """Write what transformers' ``from_pretrained`` loads: weights, configuration and tokenizer."""
        self.trainer.export_hf(folder)
        self.rollout.save_tokenizer(folder)


def throughput(metrics: dict[str, Metric], synchronous: bool) -> dict[str, Metric]:
    """Generated tokens per second of generation, or of the whole step where generation goes on all through it."""
    if "rollout/tokens" not in metrics:
        return {}
    seconds = metrics["time/generate" if synchronous else "time/step"].value
    return {"perf/tokens_per_second": Metric(metrics["rollout/tokens"].value, seconds)}


if __name__ == "__main__":
    main(sys.argv[1:])
