"""The rollout part of a run behind Ray: the driver that the launcher calls, and the actor that it starts.

``RolloutActor`` runs a ``RolloutPipeline`` (Ray-free, up to scored groups) and turns its groups into the shards of the
trainer's ranks, which go to the object store. ``RolloutDriver`` decides what to start and which weights to load
(rollout/ordering.py has the rule), and replaces an actor that is lost.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
import ray.exceptions

from miles.base.disk_faults import WriteFailed
from miles.base.host import GIB, resident_bytes
from miles.base.profiling import ProcessTrace, span
from miles.base.stacks import own_stacks, waiting_tasks
from miles.base.text import tell
from miles.base.user_code import user_code_in_thread
from miles.batch.schedule import ShardBuilder
from miles.config.components import import_builder
from miles.config.host_share import sharers_of_engine
from miles.config.settings import Settings
from miles.engine.base import EngineHost
from miles.engine.weight_sync.deltas import copied
from miles.models.tokenizer_files import save_tokenizer
from miles.objective.chosen import build_objective
from miles.observe.sample_records import SampleRecorder, StoredSamples, token_columns_of
from miles.rollout.ordering import IterationPlanner, OrderingRule, Start
from miles.rollout.pipeline import RolloutPipeline, build_pipeline
from miles.run.cpu_tuning import importing, use_threads
from miles.run.engine_actors import RayHost, worker_starter
from miles.run.failures import cause_of, in_one_line
from miles.run.liveness import END_SECONDS, REPORT, ActorLost, ProfiledActor, Workers, with_heartbeat
from miles.run.object_store import UpdateWeights, without_images
from miles.run.session import Placement
from miles.tasks.data.stream import NoPromptsLeft
from miles.training.optimizer import be_deterministic
from miles.types.images import PromptImages
from miles.types.metrics import Metric
from miles.types.sample import PromptGroup
from miles.types.train_batch import TrainShard
from miles.types.weights import WeightChunk

T = TypeVar("T")

WORKER_TRIES = 4  # in a row: a worker that always fails is not replaced forever
CLOSE_SECONDS = 20.0  # for stopping the servers, which takes a few seconds each, all at once


@dataclass(frozen=True)
class IterationSummary:
    """The part of an iteration that the main loop sees.

    Attributes:
        metrics: Its metrics, ``rollout/…`` and ``time/…``.
        samples: The samples to store.
        prompts_after: The position in the prompts after it, for a process that replaces this one.
    """

    metrics: dict[str, Metric]
    samples: StoredSamples
    prompts_after: dict[str, Any]


def _thumbnails(images: PromptImages, tokens: int) -> list[str]:
    from miles.models.images import thumbnails  # a run with text reads none of it

    return thumbnails(images, tokens)


@dataclass(frozen=True)
class GeneratedIteration:
    """A generated iteration as the main loop sees it. The shards stay in the object store."""

    summary: IterationSummary
    # Per token rank, a list of TrainShard, one per optimizer step; stored ones after the images of the iteration.
    shards_by_rank: list[Any]


class RolloutDriver:
    """Starts the rollout worker and calls it.

    Weight updates are sent one by one, as each holds a whole model in memory.

    With ``--use-fault-tolerance`` a worker that dies or hangs is replaced. The new one starts engines, gets the newest
    weights and the position in the prompts after the last iteration that the main loop received, and generates again
    what was in progress. Iterations that were received are not lost with the worker. So each prompt is trained on once.
    """

    def __init__(self, settings: Settings, placement: Placement, workers: Workers) -> None:
        self.settings = settings
        self._placement = placement
        self._workers = workers
        self._replaces = settings.sglang.use_fault_tolerance
        self._started: dict[int, list[ray.ObjectRef[Any]]] = {}  # iterations that the main loop has not received
        self._update: ray.ObjectRef[Any] | None = None  # the weight update in progress
        self._dead = False
        self._position: dict[str, Any] | None = None  # in the prompts, after the last iteration that was received
        self._weights: tuple[UpdateWeights | None, int] | None = None  # the newest, if workers are replaced
        self.weight_metrics: dict[str, Metric] = {}  # of the last weight update that has ended
        self._whole_updates = 0  # updates that gave an engine all weights
        self._actor: Any = with_heartbeat(RolloutActor).options(**placement.rollout_options())
        self.num_iterations = self._start()

    def _start(self) -> int:
        """Start a worker; return how many iterations the run has."""
        self.worker: Any = self._actor.remote(self.settings, self._placement)
        self._workers.add("the rollout worker", self.worker, replaceable=self._replaces)
        try:
            num_iterations: int = self._result(self.worker.prepare.remote())
        except BaseException:
            self.stop()
            raise
        rule = OrderingRule.from_flags(self.settings.rollout, self.settings.reads_samples)
        self._planner = IterationPlanner(rule, num_iterations)
        return num_iterations

    def generate(self, iteration: int) -> GeneratedIteration | None:
        """Wait for an iteration, while later ones are generated as the rule allows; None if no prompts are left."""

        def ask() -> IterationSummary | None:
            for start in self._planner.start_until(iteration):
                generate = self.worker.generate_stored.options(num_returns=2 + self.settings.dims.replicas)
                self._started[start.iteration] = generate.remote(start)
            summary: IterationSummary | None = self._result(self._started[iteration][0])
            return summary

        summary = self._surviving(ask)
        if summary is None:
            return None
        self._position = summary.prompts_after
        _, images, *of_replica = self._started.pop(iteration)
        dims = self.settings.dims
        by_rank = [(images, of_replica[dims.replica_of(rank)]) for rank in range(dims.token_ranks)]
        return GeneratedIteration(summary, by_rank)

    def _surviving(self, call: Callable[[], T]) -> T:
        """Return the result of ``call``. If the worker is lost and may be replaced, replace it and call again."""
        for tries_left in reversed(range(WORKER_TRIES if self._replaces else 1)):
            try:
                if self._dead:
                    self._replace()
                return call()
            except ray.exceptions.RayError as error:
                lost = isinstance(error, ActorLost) and error.worker is self.worker
                # A new worker whose engines do not start, because one was killed as well, is replaced too.
                failed_again = self._dead and not isinstance(cause_of(error), ActorLost | ValueError | WriteFailed)
                if tries_left == 0 or not (lost or failed_again):
                    raise
                self._dead = True
                replaced = "the rollout worker is replaced, and what was being generated is generated again"
                tell(f"{in_one_line(error)}; {replaced}")
        raise AssertionError("unreachable")

    def _replace(self) -> None:
        self._workers.replace(self.worker)
        self._started.clear()
        self._update = None
        self._start()
        if self._position is not None:
            self._result(self.worker.restore.remote(self._position))
        if self._weights is not None:
            weights, version = self._weights
            after = self._planner.load_weights(version)
            self._note_update(self._result(self.worker.update_weights.remote(weights, version, after)))
        self._dead = False

    def _result(self, call: ray.ObjectRef[Any]) -> Any:
        """Return the result of ``call``. A failed weight update is raised, as ``call`` may wait for it forever."""
        updates = [] if self._update is None else [self._update]
        return self._workers.results([call], updates, whose=self.worker)[0]

    def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of all evaluation sets under the newest weights."""

        def ask() -> dict[str, Metric]:
            self._settle_update()
            metrics: dict[str, Metric] = self._result(self.worker.evaluate.remote())
            return metrics

        return self._surviving(ask)

    def update_weights(self, weights: UpdateWeights | None, version: int) -> None:
        """Give the engine new weights; None lets it keep those that it has."""
        if self._replaces:
            self._weights = (weights, version)

        def send() -> None:
            self._settle_update()
            after = self._planner.load_weights(version)
            self._update = self.worker.update_weights.remote(weights, version, after)
            if self._planner.awaits_loading:
                self._settle_update()

        self._surviving(send)

    def _settle_update(self) -> None:
        if self._update is not None:
            self._note_update(self._workers.results([self._update], whose=self.worker)[0])
            self._update = None

    def _note_update(self, metrics: dict[str, Metric]) -> None:
        if "weight_sync/whole" in metrics:  # with --update-weight-transfer-mode disk-delta
            self._whole_updates += metrics["weight_sync/whole"].value > 0
            metrics = metrics | {"weight_sync/whole_updates": Metric(self._whole_updates)}
        self.weight_metrics = metrics or self.weight_metrics

    def progress(self) -> str | None:
        """Say how many groups of the iteration in progress are ready. Any thread may call it.

        None if the worker does not know, or does not answer within a second.
        """
        with suppress(ray.exceptions.RayError):
            counts = ray.get(self.worker.progress.remote(), timeout=1.0)
            return None if counts is None else f"{counts[0]} of {counts[1]} groups"
        return None

    def release_memory(self) -> None:
        """Have the engines release their GPU memory until ``update_weights``."""
        self._surviving(lambda: self._result(self.worker.release_memory.remote()))

    def state(self, iterations_done: int) -> dict[str, Any]:
        """Return the state for a checkpoint: a run that resumes from it draws every prompt that was not trained on."""
        return self._surviving(lambda: self._result(self.worker.state.remote(iterations_done)))

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        self._position = state
        self._surviving(lambda: self._result(self.worker.restore.remote(state)))

    def save_tokenizer(self, folder: Path) -> None:
        """Add the tokenizer to a Hugging Face export."""
        self._surviving(lambda: self._result(self.worker.save_tokenizer.remote(str(folder.absolute()))))

    def start_profile(self) -> None:
        """Have the worker record its work."""
        self._surviving(lambda: self._result(self.worker.start_profile.remote()))

    def stop_profile(self) -> list[ProcessTrace]:
        """Return the recording of the worker; nothing if it has replaced another since ``start_profile``."""
        traces: list[ProcessTrace] = self._surviving(lambda: self._result(self.worker.stop_profile.remote()))
        return traces

    def stop(self) -> None:
        """End the worker, whatever it is doing, and the servers that it has started."""
        if self.settings.num_engines:
            # A worker that is dead or does not answer takes its servers with it, if less gently.
            with suppress(ray.exceptions.RayError):
                ray.get(self.worker.close.remote(), timeout=CLOSE_SECONDS)
        self._workers.end(self.worker)


class RolloutActor(ProfiledActor):
    """Runs the rollout pipeline in a separate process, as an asyncio actor: its calls overlap.

    The constructor does nothing that can fail, since Ray turns its exceptions into the death of the actor.
    """

    def __init__(self, settings: Settings, placement: Placement | None) -> None:
        """Note what to run.

        Args:
            settings: The run.
            placement: Its devices in Ray; None for an object that no actor holds (run/one_process/drivers.py).
        """
        super().__init__("rollout")
        self._settings = settings
        self._placement = placement
        self._built: RolloutPipeline | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pipeline(self) -> RolloutPipeline:
        """The pipeline; it is there from ``prepare`` on."""
        assert self._built is not None, "prepare() comes first"
        return self._built

    async def prepare(self) -> int:
        """Build the pipeline and start the engine; return how many iterations the run has.

        Raises:
            ValueError: See ``build_pipeline``.
        """
        assert self._placement is not None, "Ray has placed this actor"
        use_threads(self._placement.device, sharers_of_engine(self._settings))
        start_worker = None
        if self._settings.rollout.num_rollout_workers > 1:
            start_worker = partial(worker_starter, self._settings, self._placement)
        return await self.build(RayHost(self._placement), start_worker)

    async def build(self, host: EngineHost, start_worker: Any = None) -> int:
        """Build the pipeline and start the engine on the devices of ``host``; as ``prepare``."""
        with importing():  # not at the top: the launcher needs none of it
            from transformers.utils.logging import disable_progress_bar

            import_builder(self._settings.engine)
        self._loop = asyncio.get_running_loop()
        # The progress bar of loading weights: the screen belongs to the launcher.
        disable_progress_bar()
        if self._settings.training.deterministic_mode:
            be_deterministic()  # the embedded engine computes here
        self._shards = ShardBuilder(self._settings)
        self._built = await build_pipeline(self._settings, host, start_worker)
        self._recorder = SampleRecorder(
            self._built.tokenizer,
            max_bytes=self._settings.tracking.samples_max_bytes,
            num_iterations=self._built.num_iterations,
            steps_per_iteration=self._settings.steps_per_iteration,
            advantage_by_sample=not build_objective(self._settings.loss).estimates_by_token,
            token_values=self._settings.tracking.token_values,
            token_columns=token_columns_of(self._settings.loss, self._settings.steps_per_pass),
            thumbnails=_thumbnails,
        )
        return self._built.num_iterations

    async def generate(self, start: Start) -> tuple[IterationSummary | list[TrainShard] | None, ...]:
        """Collect an iteration when its turn comes; return its summary, and for each replica the shards of its ranks.

        The ranks that share all of their sequences have the same shards. If too few prompts are left, the summary is
        None, and there are no shards.
        """
        try:
            async with self.pipeline.collecting(start) as collected:
                # In a thread, so that the engine continues meanwhile.
                shards, samples = await user_code_in_thread(self._convert, start.iteration, collected.scored.groups)
        except NoPromptsLeft:
            return None, *([] for _ in range(self._settings.dims.replicas))
        memory = {"perf/rollout_memory_gib": Metric(resident_bytes() / GIB)}
        summary = IterationSummary(collected.scored.metrics | collected.load | memory, samples, collected.prompts_after)
        return summary, *(shards[rank] for rank in self._settings.dims.first_token_ranks)

    async def generate_stored(self, start: Start) -> tuple[Any, ...]:
        """As ``generate``, for the object store: the summary, the images of all shards, and the shards without them.

        The caller asks for as many ``num_returns``. Then it owns the objects, and they outlive this actor.
        """
        outputs: tuple[Any, ...] = await self.generate(start)
        summary, *shards = outputs
        images, numbered = without_images(shards)
        return summary, images, *numbered

    def _convert(self, iteration: int, groups: list[PromptGroup]) -> tuple[list[list[TrainShard]], StoredSamples]:
        with span("convert and schedule"):
            shards = self._shards.build(iteration, groups)
        with span("describe samples"):
            samples = self._recorder.record(iteration, groups, shards)
            return samples.marked(shards), samples

    async def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of every evaluation set under the engine's weights."""
        return await self.pipeline.evaluate()

    async def update_weights(self, weights: UpdateWeights | None, version: int, after: int | None) -> dict[str, Metric]:
        """Give the engine weights of ``version`` when iteration ``after`` is collected (None: at once).

        If ``weights`` is None, the engine keeps those that it has.

        Returns:
            The metrics ``weight_sync/…``; none if no weights are sent.
        """
        if weights is None:
            await self.pipeline.update_weights(None, version, after)
            return {}
        sent = weights.opened()
        settings = self._settings
        has_servers = settings.engine.has_servers  # whose hosts have copies
        chunks: Iterable[WeightChunk] = sent
        if settings.sends_deltas and not has_servers:
            chunks = copied(sent, settings.sglang.update_weight_copy_dir, settings.weights_folder)
        seconds = await self.pipeline.update_weights(chunks, version, after)
        metrics = sent.metrics(seconds)
        return {"weight_sync/whole": Metric(1.0)} | metrics if settings.sends_deltas else metrics

    async def release_memory(self) -> None:
        """Have the engines release their GPU memory until new weights arrive."""
        await self.pipeline.producer.release_memory()

    async def state(self, iterations_done: int) -> dict[str, Any]:
        """Return the position in the prompts before iteration ``iterations_done``, for a checkpoint."""
        return self.pipeline.state(iterations_done)

    async def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's position in the prompts."""
        self.pipeline.restore(state)

    async def start_profile(self) -> None:
        """Record the work of this process and of the generation workers from now on."""
        await self.pipeline.producer.start_profile()
        super().start_profile()

    async def stop_profile(self) -> list[ProcessTrace]:
        """Return the recording."""
        traces: list[ProcessTrace] = super().stop_profile()
        return [*traces, *await self.pipeline.producer.stop_profile()]

    async def save_tokenizer(self, folder: str) -> None:
        """Add the tokenizer to a Hugging Face export, and the processor of a model that reads images."""
        save_tokenizer(self.pipeline.tokenizer, folder)

    @ray.method(concurrency_group=REPORT)
    async def describe(self) -> str:
        """Return queues, coroutines and stacks of this process, for the report of a hang."""
        queues = {} if self._built is None else self._built.producer.queue_lengths()
        lines = [f"{name}: {length}" for name, length in queues.items()]
        if self._loop is not None:
            lines += [f"{number} x {where}" for where, number in waiting_tasks(self._loop).most_common()]
        return "\n".join([*lines, own_stacks()])

    @ray.method(concurrency_group=REPORT)
    async def progress(self) -> tuple[int, int] | None:
        """Return how many groups of the iteration in progress are ready, and of how many; None if it is not known."""
        return None if self._built is None else self._built.collector.progress

    @ray.method(concurrency_group=REPORT)
    async def end_process(self) -> None:
        """End this process at once, but for the servers that the engine has started: these are stopped first."""
        if self._loop is not None and self._settings.num_engines:
            closing = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close(), self._loop))
            await asyncio.wait([closing], timeout=END_SECONDS)
        os._exit(0)

    async def close(self) -> None:
        """Stop the servers that the engine has started. No call may follow."""
        if self._built is not None:
            await self._built.producer.close()
