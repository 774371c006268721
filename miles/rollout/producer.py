"""What produces groups, opened together and closed together: engine, workers, teacher, and the server of agents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from miles.base.host import memory_limit
from miles.base.profiling import ProcessTrace
from miles.config.settings import Settings
from miles.engine.base import (
    Engine,
    EngineHost,
    EngineWrapper,
    Generation,
    GenerationRequest,
    HasQueues,
    ReleasesMemory,
    ServedTeacher,
    SharesServers,
    connect_teacher,
    start_engine,
)
from miles.rollout.chosen_generator import get_group_generator, session_generator
from miles.rollout.groups import GroupTools
from miles.rollout.workers.pool import StartWorker, WorkerPool
from miles.tasks.rewards.registry import get_reward_function
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.rollout.agents.generator import SessionGenerator


class MeteredEngine(EngineWrapper):
    """Adds up the time with requests, from the first request on, and from each reading on.

    A response is in flight from its request to its answer, also while it waits for a slot in the engine.

    Args:
        engine: Answers the requests.
        clock: Returns seconds.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(engine)
        self._clock = clock
        self._began: float | None = None  # the start of the sum; None before the first request
        self._counted = 0.0  # the time up to which seconds are added up
        self._in_flight = 0
        self._busy = 0.0  # seconds with a response in flight
        self._response_seconds = 0.0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return what the engine answers."""
        self._count()
        self._in_flight += len(request.seeds)
        try:
            return await super().generate(request)
        finally:
            self._count()
            self._in_flight -= len(request.seeds)

    def metrics(self) -> dict[str, Metric]:
        """Return what was measured since the last reading, and reset it; empty before the first request.

        ``perf/engine_busy`` is the share of the time with a response in flight, and ``perf/engine_responses`` the mean
        number of these in that time.
        """
        if self._began is None:
            return {}
        self._count()
        metrics = {
            "perf/engine_busy": Metric(self._busy, self._counted - self._began),
            "perf/engine_responses": Metric(self._response_seconds, self._busy),
        }
        self._began, self._busy, self._response_seconds = self._counted, 0.0, 0.0
        return {name: metric for name, metric in metrics.items() if metric.denominator}

    def _count(self) -> None:
        now = self._clock()
        if self._began is None:
            self._began = self._counted = now
        if self._in_flight:
            self._busy += now - self._counted
            self._response_seconds += (now - self._counted) * self._in_flight
        self._counted = now


@dataclass(frozen=True)
class GroupProducer:
    """Holds what produces groups. It is empty if nothing is generated (saved samples, no evaluation).

    Attributes:
        engine: Generates.
        tools: The tools of evaluation. Their engine measures its load, unless they have workers, which use its servers.
        teacher: Scores the samples of groups that are trained on.
        agents: Runs agent programs.
    """

    engine: Engine | None = None
    tools: GroupTools | None = None
    teacher: ServedTeacher | None = None
    agents: SessionGenerator | None = None

    @property
    def workers(self) -> WorkerPool | None:
        """The processes that produce groups; None if this one does."""
        return None if self.tools is None else self.tools.workers

    def load_metrics(self) -> dict[str, Metric]:
        """Return the load of the engine since the last call; empty with generation workers, which do not measure it."""
        engine = None if self.tools is None else self.tools.engine
        return engine.metrics() if isinstance(engine, MeteredEngine) else {}

    @property
    def training_tools(self) -> GroupTools | None:
        """The tools of groups that are trained on."""
        return None if self.tools is None else replace(self.tools, teacher=self.teacher)

    def queue_lengths(self) -> dict[str, int]:
        """Return the lengths of the queues of engine and workers, as far as known, for the report of a hang."""
        loads = {} if self.workers is None else self.workers.loads()
        return loads | (self.engine.queue_lengths() if isinstance(self.engine, HasQueues) else {})

    async def release_memory(self) -> None:
        """Have the engine release its GPU memory until new weights arrive."""
        assert isinstance(self.engine, ReleasesMemory), "check_offload() allows it for such engines only"
        await self.engine.release_memory()

    async def start_profile(self) -> None:
        """Have the generation workers record their work."""
        if self.workers is not None:
            await self.workers.start_profile()

    async def stop_profile(self) -> list[ProcessTrace]:
        """Return the recordings of the generation workers."""
        return [] if self.workers is None else await self.workers.stop_profile()

    async def close(self) -> None:
        """Close all of it, the engine last. No call may follow."""
        for part in (self.workers, self.agents, self.teacher, self.engine):
            if part is not None:
                await part.close()


async def start_producer(
    settings: Settings, host: EngineHost, tokenizer: Any, worker_starter: Callable[[Any], StartWorker] | None
) -> GroupProducer:
    """Load the reward and the generator that the flags name, then start the engine and its workers.

    Raises:
        ValueError: A reward or function is unknown, or the engine does not start.
    """
    if not settings.generates:
        return GroupProducer()
    reward = settings.reward
    agents = session_generator(settings)
    generate = agents or get_group_generator(settings.rollout)
    function = get_reward_function(reward, memory_limit(reward.reward_memory))
    engine = await start_engine(settings, host)
    tools = GroupTools(engine, tokenizer, generate, function, reward.reward_error_value, reward.drops_errors)
    workers_wanted = settings.rollout.num_rollout_workers
    try:
        if workers_wanted == 1:
            tools = replace(tools, engine=MeteredEngine(engine))
        else:
            assert isinstance(engine, SharesServers) and worker_starter is not None, "validate() refuses other engines"
            replaces = settings.sglang.use_fault_tolerance
            workers = WorkerPool(worker_starter(tokenizer), workers_wanted, engine, replaces)
            await workers.start()
            tools = replace(tools, workers=workers)
    except BaseException:
        await engine.close()
        raise
    return GroupProducer(engine, tools, connect_teacher(settings), agents)
