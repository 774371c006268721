"""The rollout part of a run, without Ray: prompts, engine, rewards, filters and evaluation; it ends at scored groups.

::

    PromptStream ─ draw ─> PromptGroup ─ engine ─> samples ─ reward ─ filter ─> scored groups of one iteration
                              └────────── produce_group ────────────┘          └── a GroupCollector ──┘

``build_pipeline`` chooses the parts from the flags. ``RolloutGate`` decides when each call may run (ordering.py).
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from miles.base.host import memory_limit
from miles.base.profiling import ProcessTrace, waiting
from miles.base.threads import in_thread
from miles.base.tokenizer import load_tokenizer
from miles.base.user_code import user_code_in_thread
from miles.config.flags_view import flags_view
from miles.config.model import local_vocab_size
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.engine.base import (
    Engine,
    EngineHost,
    EngineLoad,
    HasQueues,
    MeteredEngine,
    ReleasesMemory,
    ServedTeacher,
    SharesServers,
    connect_teacher,
    start_engine,
)
from miles.models.packing import reads_images
from miles.models.reading import read_config
from miles.rollout.chosen_generator import get_group_generator, session_generator
from miles.rollout.collect import BurstCollector, GroupCollector, HasProgress, ScoredGroups
from miles.rollout.conversation_collector import ConversationCollector
from miles.rollout.debug_data import SavedGroups, save_rollout
from miles.rollout.evaluate import EvalSet, evaluate
from miles.rollout.groups import GroupGenerator, GroupSpec, GroupTools, GroupWorkers, produce_group
from miles.rollout.hooks import (
    BufferFilter,
    FunctionCollector,
    IterationHooks,
    RolloutTools,
    load_rollout_function,
    own_evaluation,
)
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.rollout.metrics import leave_out_mastered, staleness_metrics
from miles.rollout.ordering import LeftoverGroups, OrderingRule, Overlap, RolloutGate, Start
from miles.rollout.stream_collector import Interruptible, StreamCollector
from miles.rollout.supply import build_supply, iterations_of, load_held_out
from miles.rollout.workers.pool import InterruptibleWorkers, StartWorker, WorkerPool
from miles.tasks.data.stream import TrainingStream
from miles.tasks.rewards.base import RewardFunction
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.weights import WeightChunk

if TYPE_CHECKING:
    from miles.rollout.agents.generator import SessionGenerator


@dataclass(frozen=True)
class CollectedIteration:
    """The scored groups of an iteration, the position in the prompts after they were drawn, and the engine's load."""

    scored: ScoredGroups
    prompts_after: dict[str, Any]
    load: dict[str, Metric]

    @property
    def metrics(self) -> dict[str, Metric]:
        """The metrics of the groups, and of the engine's load."""
        return self.scored.metrics | self.load


class RolloutPipeline:
    """Collects iterations, evaluates, and loads weights into the engine, in one process and one event loop.

    Calls may overlap: under ``--async-steps`` iterations are collected while weights arrive and checkpoints are saved.

    Args:
        engine: None if nothing is generated (saved samples, no evaluation).
        tools: The tools that evaluation generates with; None without an engine. ``close`` ends its workers.
        stream: None if there are no prompts to train on.
        num_iterations: How many iterations the run has.
        hooks: The user's functions on each iteration.
        evaluation: The user's evaluation, of a version of the weights; None for the evaluation of ``eval_sets``.
        teacher: The servers of a teacher, which ``close`` disconnects from.
        agents: The generator that runs agent programs; ``close`` stops its server.
        load: Measures the requests to the engine of ``tools``; None with generation workers.
        reads_images: Whether the model has a processor.
    """

    def __init__(
        self,
        *,
        tokenizer: Any,
        engine: Engine | None,
        tools: GroupTools | None,
        collector: GroupCollector,
        stream: TrainingStream | None,
        eval_sets: list[EvalSet],
        rollout: RolloutArguments,
        rule: OrderingRule,
        seed: int,
        num_iterations: int,
        hooks: IterationHooks | None = None,
        evaluation: Callable[[int], Awaitable[dict[str, Metric]]] | None = None,
        teacher: ServedTeacher | None = None,
        agents: SessionGenerator | None = None,
        load: EngineLoad | None = None,
        reads_images: bool = False,
    ) -> None:
        self.engine = engine
        self._reads_images = reads_images
        self.num_iterations = num_iterations
        self.tokenizer = tokenizer
        self._tools = tools
        self._collector = collector
        self._stream = stream
        self._eval_sets = eval_sets
        self._rollout = rollout
        self._rule = rule
        self._seed = seed
        self._hooks = None if hooks is None or hooks.is_idle else hooks
        self._evaluation = evaluation
        self._teacher = teacher
        self._agents = agents
        self._load = load
        self._workers = None if tools is None else tools.workers
        self._gate = RolloutGate()
        self._positions: dict[int, dict[str, Any]] = {}  # in the prompts, before each iteration in progress

    @asynccontextmanager
    async def collecting(self, start: Start) -> AsyncIterator[CollectedIteration]:
        """Collect ``start.iteration`` when its turn comes, and yield its scored groups.

        The next iteration starts when the block is left: converting the groups belongs into the block.
        """
        async with self._gate.collecting(start):
            oldest = start.iteration - self._rule.max_staleness  # that the launcher may still ask for
            self._positions = {i: position for i, position in self._positions.items() if i >= oldest}
            self._positions[start.iteration] = self._collector.state()
            began = time.perf_counter()
            scored = await self._collect(start.iteration)
            load = {} if self._load is None else self._load.metrics()
            prompts_after = self._collector.state()
            if self._rollout.save_debug_rollout_data is not None:
                path = self._rollout.save_debug_rollout_data
                await in_thread(save_rollout, path, start.iteration, scored.groups)
            if self._hooks is not None:  # in a thread, so that the engine continues meanwhile
                seconds = time.perf_counter() - began
                scored = await user_code_in_thread(self._hooks.apply, start.iteration, scored, seconds)
            yield CollectedIteration(scored, prompts_after, load)

    async def _collect(self, iteration: int) -> ScoredGroups:
        began = time.perf_counter()
        weights: Mapping[str, float] = {}
        if self._stream is not None:
            self._stream.start(iteration)
            weights = self._stream.weights
        scored = await self._collector.collect(iteration)
        if self._stream is not None:
            self._stream.record(iteration, scored.generated or scored.groups)
        metrics = scored.metrics | {f"rollout/prompt_weight/{name}": Metric(w) for name, w in weights.items()}
        if self._rule.generates_stale_tokens and self._rollout.load_debug_rollout_data is None:
            metrics = metrics | staleness_metrics(scored.groups, iteration)
        if self._rule.overlap is not Overlap.SYNCHRONOUS:  # otherwise it is the launcher's time/generate
            metrics = metrics | {"time/rollout": Metric(time.perf_counter() - began)}
        return replace(scored, metrics=metrics)

    async def evaluate(self) -> dict[str, Metric]:
        """Return the metrics of every evaluation set under the engine's weights."""
        assert self._tools is not None, "evaluation generates, so there is an engine"
        async with self._gate.evaluating():
            if self._evaluation is not None:
                return await self._evaluation(self._gate.version)
            metrics, _ = await evaluate(self._eval_sets, self._tools, self._seed)
        return metrics

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
            if self.engine is not None and chunks is not None:
                with waiting("update weights"):
                    await self.engine.update_weights(chunks, version)
            self._collector.weights_changed(version)
        return time.perf_counter() - began

    async def release_memory(self) -> None:
        """Have the engine release its GPU memory until new weights arrive."""
        assert isinstance(self.engine, ReleasesMemory), "check_offload() allows it for such engines only"
        await self.engine.release_memory()

    def state(self, iterations_done: int) -> dict[str, Any]:
        """Return the position in the prompts before iteration ``iterations_done``, for a checkpoint.

        That iteration may be in progress already, or complete.
        """
        return self._positions.get(iterations_done) or self._collector.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's position in the prompts."""
        if self._stream is not None and state:
            self._stream.restore(state)

    def queue_lengths(self) -> dict[str, int]:
        """Return the lengths of the queues of engine and workers, as far as known, for the report of a hang."""
        loads = {} if self._workers is None else self._workers.loads()
        return loads | (self.engine.queue_lengths() if isinstance(self.engine, HasQueues) else {})

    def progress(self) -> tuple[int, int] | None:
        """Return how many groups of the iteration in progress are ready, and of how many; None if that is not known."""
        return self._collector.progress if isinstance(self._collector, HasProgress) else None

    def save_tokenizer(self, folder: str) -> None:
        """Add the tokenizer to a Hugging Face export, and the processor of a model that reads images."""
        self.tokenizer.save_pretrained(folder)
        if self._reads_images:
            from miles.models.images import load_processor

            load_processor(self.tokenizer.name_or_path).save_pretrained(folder)

    async def start_profile(self) -> None:
        """Have the generation workers record their work."""
        if self._workers is not None:
            await self._workers.start_profile()

    async def stop_profile(self) -> list[ProcessTrace]:
        """Return the recordings of the generation workers."""
        return [] if self._workers is None else await self._workers.stop_profile()

    async def close(self) -> None:
        """Close the engine. No call may follow."""
        if self._workers is not None:
            await self._workers.close()
        if self._agents is not None:
            await self._agents.close()
        if self._teacher is not None:
            await self._teacher.close()
        if self.engine is not None:
            await self.engine.close()


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
    rollout, reward, data = settings.rollout, settings.reward, settings.data
    tokenizer = load_tokenizer(str(settings.model.hf_checkpoint))
    reward_function, eval_sets = _reward_function(reward), load_held_out(settings, tokenizer)
    supply, agents = build_supply(settings, tokenizer), session_generator(settings)
    generate, hooks = agents or get_group_generator(rollout), IterationHooks(settings, supply.stream)
    num_iterations = iterations_of(rollout, supply.num_prompts)
    engine = await start_engine(settings, host) if settings.generates else None
    teacher, tools, load = connect_teacher(settings), None, None
    try:
        if engine is not None:
            tools = _group_tools(engine, tokenizer, generate, reward_function, reward)
            tools, load = await _with_workers(settings, tools, worker_starter)
        evaluation = own_evaluation(settings, eval_sets, tools) if tools is not None else None
        collector = build_collector(
            supply.stream,
            None if tools is None else replace(tools, teacher=teacher),
            rollout,
            reward,
            data.rollout_seed,
            num_iterations,
            local_vocab_size(settings.model),
            settings.reads_conversations,
            settings.loss.reads_greedy_baseline,
            flags_view(settings),
        )
    except BaseException:
        await _close(engine, None if tools is None else tools.workers)
        raise
    return RolloutPipeline(
        tokenizer=tokenizer,
        engine=engine,
        tools=tools,
        collector=collector,
        stream=supply.stream,
        eval_sets=eval_sets,
        rollout=rollout,
        rule=OrderingRule.from_flags(rollout),
        seed=data.rollout_seed,
        num_iterations=num_iterations,
        hooks=hooks,
        evaluation=evaluation,
        teacher=teacher,
        agents=agents,
        load=load,
        reads_images=reads_images(read_config(str(settings.model.hf_checkpoint)).to_dict()),
    )


def _reward_function(reward: RewardArguments) -> RewardFunction | None:
    scores = reward.rm_type is not None or reward.custom_rm_path is not None
    return get_reward_function(reward, memory_limit(reward.reward_memory)) if scores else None


def _group_tools(
    engine: Engine, tokenizer: Any, generate: GroupGenerator, function: RewardFunction | None, reward: RewardArguments
) -> GroupTools:
    assert function is not None, "validate() requires a reward if samples are generated"
    return GroupTools(engine, tokenizer, generate, function, reward.reward_error_value, reward.drops_errors)


async def _with_workers(
    settings: Settings, tools: GroupTools, worker_starter: Callable[[Any], StartWorker] | None
) -> tuple[GroupTools, EngineLoad | None]:
    """Start the generation workers, which use the servers of the engine; without any, measure the engine's load."""
    number, replaces = settings.rollout.num_rollout_workers, settings.sglang.use_fault_tolerance
    if number == 1:
        load = EngineLoad()
        return replace(tools, engine=MeteredEngine(tools.engine, load)), load
    assert isinstance(tools.engine, SharesServers) and worker_starter is not None, "validate() refuses other engines"
    workers = WorkerPool(worker_starter(tools.tokenizer), number, tools.engine, replaces)
    await workers.start()
    return replace(tools, workers=workers), None


async def _close(engine: Engine | None, workers: GroupWorkers | None) -> None:
    if workers is not None:
        await workers.close()
    if engine is not None:
        await engine.close()


def build_collector(
    stream: TrainingStream | None,
    tools: GroupTools | None,
    rollout: RolloutArguments,
    reward: RewardArguments,
    seed: int,
    num_iterations: int,
    vocab_size: int | None = None,
    reads_conversations: bool = False,
    greedy_baseline: bool = False,
    args: Any = None,
) -> GroupCollector:
    """Return the collector that the flags choose: saved groups, the user's function, bursts, or a stream of groups.

    Conversations to train on have a collector of their own.

    Args:
        stream: The prompts; may be None for saved groups.
        tools: The tools that produce groups; may be None for saved groups.
        rollout: The flags that decide.
        reward: The flags of rewards.
        seed: The seed of the run's responses.
        num_iterations: How many iterations the run has.
        vocab_size: The end of the token ids of saved groups, if it is known.
        reads_conversations: Whether ``stream`` draws conversations to train on.
        greedy_baseline: Whether each group has a greedy response too, whose reward the estimator reads.
        args: All flags by their names, for functions of the user's.

    Raises:
        ValueError: A function or a filter cannot be imported.
    """
    if rollout.load_debug_rollout_data is not None:
        return SavedGroups(rollout.load_debug_rollout_data, reward.log_passrate, stream, vocab_size)
    if reads_conversations:
        assert stream is not None and rollout.rollout_batch_size is not None
        return ConversationCollector(stream, rollout.rollout_batch_size)
    assert stream is not None and tools is not None, "validate() requires --prompt-data"
    rule = OrderingRule.from_flags(rollout)
    spec = _group_spec(stream, rollout, seed, greedy_baseline)
    path = rollout.rollout_function_path
    if path is not None:
        make_group = partial(produce_group, tools=tools, spec=spec)
        given = RolloutTools(stream, make_group, tools.engine, tools.tokenizer, tools.reward_function, rollout, reward)
        return FunctionCollector(path, load_rollout_function(path), given)
    if rule.leftover is LeftoverGroups.AWAIT:
        return BurstCollector(stream, partial(produce_group, tools=tools, spec=spec), rollout, reward, rule)
    engine = tools.engine
    interruptible = InterruptibleEngine(engine) if rule.leftover is LeftoverGroups.INTERRUPT else None
    tools = replace(tools, engine=interruptible or engine, interrupts=interruptible is not None)
    return StreamCollector(
        stream,
        partial(produce_group, tools=tools, spec=spec),
        rollout,
        reward,
        rule,
        num_iterations=num_iterations,
        engine=engine,
        interruptible=None if interruptible is None else _stops(interruptible, tools.workers),
        buffer_filter=None if rollout.buffer_filter_path is None else BufferFilter(rollout.buffer_filter_path, args),
    )


def _stops(engine: InterruptibleEngine, workers: GroupWorkers | None) -> Interruptible:
    """Return the object that interrupts the generation of this process, and of its workers if it has some."""
    return engine if workers is None else InterruptibleWorkers(engine, workers)


def _group_spec(stream: TrainingStream, rollout: RolloutArguments, seed: int, greedy_baseline: bool) -> GroupSpec:
    spec = GroupSpec.for_training(rollout, seed, greedy_baseline)
    if rollout.max_prompt_pass_rate is None:  # validate() refuses it with a source of the user's
        return spec
    return replace(spec, scored=leave_out_mastered(stream, rollout.max_prompt_pass_rate))
