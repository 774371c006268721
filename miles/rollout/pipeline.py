"""The rollout part of a run, without Ray: prompts, engine, rewards, filters and evaluation; it ends at scored groups.

::

    PromptStream ─ draw ─> PromptGroup ─ engine ─> samples ─ reward ─ filter ─> scored groups of one iteration
                              └────────── produce_group ────────────┘          └── a GroupCollector ──┘

``build_pipeline`` chooses the parts from the flags. ``RolloutGate`` decides when each call may run (ordering.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from miles.base.profiling import waiting
from miles.base.threads import in_thread
from miles.base.tokenizer import tokenizer_of_process
from miles.base.user_code import load_function, user_code_in_thread
from miles.config.functions import flags_view
from miles.config.inputs import load_training_prompts
from miles.config.model import local_vocab_size
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import EngineHost
from miles.rollout.collect import (
    BurstCollector,
    ConversationCollector,
    GroupCollector,
    ProduceGroup,
    ScoredGroups,
    leaving_out_mastered,
)
from miles.rollout.debug_data import SavedGroups, save_rollout
from miles.rollout.evaluate import load_eval_sets
from miles.rollout.groups import GroupSpec, GroupTools, produce_group
from miles.rollout.hooks import (
    BufferFilter,
    Evaluation,
    FunctionCollector,
    IterationHooks,
    RolloutTools,
    evaluation_of,
)
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.rollout.metrics import staleness_metrics
from miles.rollout.ordering import LeftoverGroups, OrderingRule, Overlap, RolloutGate, Start
from miles.rollout.producer import GroupProducer, start_producer
from miles.rollout.stream_collector import StreamCollector
from miles.rollout.workers.pool import StartWorker, WorkerPool
from miles.tasks.data.custom_source import CustomStream
from miles.tasks.data.prompts import RowReader
from miles.tasks.data.stream import (
    CURRICULUM_FLAG,
    CurriculumStream,
    Mixture,
    NamedSet,
    PromptStream,
    TrainingStream,
)
from miles.types.metrics import Metric
from miles.types.weights import WeightChunk


@dataclass(frozen=True)
class CollectedIteration:
    """The scored groups of an iteration, the position in the prompts after they were drawn, and the engine's load."""

    scored: ScoredGroups
    prompts_after: dict[str, Any]
    load: dict[str, Metric]


@dataclass(eq=False)
class RolloutPipeline:
    """Collects iterations, evaluates, and loads weights into the engine, in one process and one event loop.

    Calls may overlap: under ``--async-steps`` iterations are collected while weights arrive and checkpoints are saved.

    Attributes:
        tokenizer: The model's.
        producer: Produces the groups; the pipeline's owner closes it.
        collector: Collects the groups of an iteration.
        stream: The prompts to train on, if there are any.
        evaluation: Returns the metrics of all evaluation sets, given a version of the weights; None without an engine.
        rollout: The flags of rollouts.
        rule: When iterations are generated.
        num_iterations: How many iterations the run has.
        hooks: The user's functions on each iteration.
    """

    tokenizer: Any
    producer: GroupProducer
    collector: GroupCollector
    stream: TrainingStream | None
    evaluation: Evaluation | None
    rollout: RolloutArguments
    rule: OrderingRule
    num_iterations: int
    hooks: IterationHooks
    _gate: RolloutGate = field(default_factory=RolloutGate)
    _positions: dict[int, dict[str, Any]] = field(default_factory=dict)  # before each iteration in progress

    @asynccontextmanager
    async def collecting(self, start: Start) -> AsyncIterator[CollectedIteration]:
        """Collect ``start.iteration`` when its turn comes, and yield its scored groups.

        The next iteration starts when the block is left: converting the groups belongs into the block.
        """
        async with self._gate.collecting(start):
            oldest = start.iteration - self.rule.max_staleness  # the oldest that the launcher may still ask for
            self._positions = {i: position for i, position in self._positions.items() if i >= oldest}
            self._positions[start.iteration] = self.collector.state()
            began = time.perf_counter()
            scored = await self._collect(start.iteration)
            load = self.producer.load_metrics()
            prompts_after = self.collector.state()
            if self.rollout.save_debug_rollout_data is not None:
                path = self.rollout.save_debug_rollout_data
                await in_thread(save_rollout, path, start.iteration, scored.groups)
            if not self.hooks.is_idle:  # in a thread, so that the engine continues meanwhile
                seconds = time.perf_counter() - began
                scored = await user_code_in_thread(self.hooks.apply, start.iteration, scored, seconds)
            yield CollectedIteration(scored, prompts_after, load)

    async def _collect(self, iteration: int) -> ScoredGroups:
        began = time.perf_counter()
        weights: Mapping[str, float] = {}
        if self.stream is not None:
            self.stream.start(iteration)
            weights = self.stream.weights
        scored = await self.collector.collect(iteration)
        if self.stream is not None:
            self.stream.record(iteration, scored.generated or scored.groups)
        metrics = scored.metrics | {f"rollout/prompt_weight/{name}": Metric(w) for name, w in weights.items()}
        if self.rule.generates_stale_tokens:
            metrics = metrics | staleness_metrics(scored.groups, iteration)
        if self.rule.overlap is not Overlap.SYNCHRONOUS:  # otherwise it is the launcher's time/generate
            metrics = metrics | {"time/rollout": Metric(time.perf_counter() - began)}
        return replace(scored, metrics=metrics)

    async def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of every evaluation set under the engine's weights."""
        assert self.evaluation is not None, "evaluation generates, so there is an engine"
        async with self._gate.evaluating():
            return await self.evaluation(self._gate.version)

    async def update_weights(
        self, chunks: Iterable[WeightChunk] | None, version: int, after: int | None = None
    ) -> float:
        """Give the engine weights of ``version``, when iteration ``after`` is collected (None: at once).

        With ``chunks`` None the engine keeps the weights that it has, and generates ``version`` with these.

        Returns:
            The seconds that it took, from when it was the update's turn.
        """
        async with self._gate.loading(version, after):
            began = time.perf_counter()
            engine = self.producer.engine
            if engine is not None and chunks is not None:
                with waiting("update weights"):
                    await engine.update_weights(chunks, version)
            self.collector.weights_changed(version)
        return time.perf_counter() - began

    def state(self, iterations_done: int) -> dict[str, Any]:
        """Return the position in the prompts before iteration ``iterations_done``, for a checkpoint.

        That iteration may be in progress already, or complete.
        """
        return self._positions.get(iterations_done) or self.collector.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's position in the prompts."""
        if self.stream is not None and state:
            self.stream.restore(state)


@dataclass(frozen=True)
class Supply:
    """The prompts of a run.

    Attributes:
        stream: Draws them; None if there are none to train on.
        num_prompts: How many make a pass; 0 if that is not known.
    """

    stream: TrainingStream | None = None
    num_prompts: int = 0


def build_supply(settings: Settings, tokenizer: Any) -> Supply:
    """Load what ``--prompt-data``, ``--prompt-mix`` or ``--data-source-path`` names.

    Raises:
        ValueError: A row is malformed, or the source or the curriculum cannot be imported.
    """
    data, rollout = settings.data, settings.rollout
    if data.data_source_path is not None:
        reader = RowReader(data, tokenizer, reward=settings.reward, max_context_len=rollout.rollout_max_context_len)
        return Supply(CustomStream(data.data_source_path, flags_view(settings), reader))
    if data.prompt_mix is not None or data.curriculum_path is not None:
        sources = data.mixed_sources
        sets = [
            NamedSet(name, load_training_prompts(name, source, settings, tokenizer)) for name, source in sources.items()
        ]
        weights = data.prompt_mix_weights or [float(len(each.prompts)) for each in sets]
        num_prompts = sum(len(each.prompts) for each in sets)
        path = data.curriculum_path
        if path is None:
            return Supply(Mixture(sets, weights, data.rollout_shuffle, data.rollout_seed), num_prompts)
        stream = CurriculumStream(
            sets,
            weights,
            data.rollout_shuffle,
            data.rollout_seed,
            function=load_function(path, CURRICULUM_FLAG),
            path=path,
            num_iterations=iterations_of(rollout, num_prompts),
        )
        return Supply(stream, num_prompts)
    if data.prompt_data is None:
        return Supply()
    prompts = load_training_prompts("", data.prompt_data, settings, tokenizer)
    return Supply(PromptStream(prompts, data.rollout_shuffle, data.rollout_seed), len(prompts))


def iterations_of(rollout: RolloutArguments, num_prompts: int) -> int:
    """Return ``--num-rollout``, or the iterations of ``--num-epoch`` passes over the prompts."""
    if rollout.num_rollout is not None:
        return rollout.num_rollout
    assert rollout.num_epoch is not None and rollout.rollout_batch_size is not None, "validate() requires one of them"
    return math.ceil(rollout.num_epoch * num_prompts / rollout.rollout_batch_size)


async def build_pipeline(
    settings: Settings, host: EngineHost, worker_starter: Callable[[Any], StartWorker] | None = None
) -> RolloutPipeline:
    """Load the parts that the flags name, start the engine last, and connect everything.

    Args:
        settings: All sections of the run.
        host: Places the engine.
        worker_starter: Given the tokenizer, returns the function that starts a generation worker
            (``--num-rollout-workers``).

    Raises:
        ValueError: A prompt row is malformed, a reward or function is unknown, and the like.
    """
    rollout = settings.rollout
    tokenizer = tokenizer_of_process(str(settings.model.hf_checkpoint))
    eval_sets = load_eval_sets(settings, tokenizer)
    supply = build_supply(settings, tokenizer)
    hooks = IterationHooks(settings, supply.stream)
    num_iterations = iterations_of(rollout, supply.num_prompts)
    producer = await start_producer(settings, host, tokenizer, worker_starter)
    try:
        evaluation = None if producer.tools is None else evaluation_of(settings, eval_sets, producer.tools)
        collector = build_collector(settings, supply.stream, producer.training_tools, num_iterations)
    except BaseException:
        await producer.close()
        raise
    return RolloutPipeline(
        tokenizer=tokenizer,
        producer=producer,
        collector=collector,
        stream=supply.stream,
        evaluation=evaluation,
        rollout=rollout,
        num_iterations=num_iterations,
        rule=OrderingRule.from_flags(rollout, settings.reads_samples),
        hooks=hooks,
    )


def build_collector(
    settings: Settings, stream: TrainingStream | None, tools: GroupTools | None, num_iterations: int
) -> GroupCollector:
    """Return the collector that the flags choose: saved groups, the user's function, bursts, or a stream of groups.

    Conversations to train on have a collector of their own.

    Args:
        settings: All sections of the run.
        stream: The prompts; may be None for saved groups.
        tools: The tools that produce groups; may be None for saved groups.
        num_iterations: How many iterations the run has.

    Raises:
        ValueError: A function or a filter cannot be imported.
    """
    rollout, reward = settings.rollout, settings.reward
    if rollout.load_debug_rollout_data is not None:
        vocab_size = local_vocab_size(settings.model)
        return SavedGroups(rollout.load_debug_rollout_data, reward.log_passrate, stream, vocab_size)
    if settings.reads_conversations:
        assert stream is not None and rollout.rollout_batch_size is not None
        return ConversationCollector(stream, rollout.rollout_batch_size)
    assert stream is not None and tools is not None, "validate() requires --prompt-data"
    rule = OrderingRule.from_flags(rollout)
    spec = GroupSpec.for_training(rollout, settings.data.rollout_seed, settings.loss.reads_greedy_baseline)
    interruptible: InterruptibleEngine | WorkerPool | None = None
    if rule.leftover is LeftoverGroups.INTERRUPT:
        interruptible = tools.workers or InterruptibleEngine(tools.engine)
        if isinstance(interruptible, InterruptibleEngine):
            tools = replace(tools, engine=interruptible)
    produce: ProduceGroup = partial(produce_group, tools=tools, spec=spec)
    if rollout.max_prompt_pass_rate is not None:  # validate() refuses it with a source of the user's
        produce = leaving_out_mastered(produce, stream, rollout.max_prompt_pass_rate)
    path = rollout.rollout_function_path
    if path is not None:
        inputs = RolloutTools(stream, produce, tools.engine, tools.tokenizer, tools.reward_function, rollout, reward)
        return FunctionCollector(path, inputs)
    if rule.leftover is LeftoverGroups.AWAIT:
        return BurstCollector(stream, produce, rollout, reward, rule)
    path = rollout.buffer_filter_path
    return StreamCollector(
        stream,
        produce,
        rollout,
        reward,
        rule,
        num_iterations=num_iterations,
        engine=tools.engine,
        interruptible=interruptible,
        buffer_filter=None if path is None else BufferFilter(path, flags_view(settings)),
    )
