"""Decide when and with what weights each iteration is generated, and which iteration is trained at the same time.

Weights of version v were trained on v iterations. Iteration r is trained by weights of version r, and may be generated
by weights that are up to K versions older (``--async-steps K``). The rollout process is in one of three states::

               start r: iteration r - 1 is collected, and the engine has weights of version r - K or newer
            ┌─────────────────────────────────────────────────────────────────────────────────────────────┐
            │                                                                                             ▼
      ┌───────────┐    enough groups are scored, converted and scheduled; leftover groups: see below  ┌────────────┐
      │   IDLE    │◀──────────────────────────────────────────────────────────────────────────────────│ COLLECTING │
      └───────────┘                                                                                   └────────────┘
          │   ▲
          ▼   │ evaluation starts and ends
      ┌────────────┐
      │ EVALUATING │
      └────────────┘

    overlap       flags                       trained meanwhile  the engine loads new weights    version r generates
    SYNCHRONOUS   K = 0                       nothing            while IDLE                      iteration r
    READ_AHEAD    samples that are read       iteration r - 1    while IDLE, between iterations  nothing
    AHEAD         --async-steps K             iteration r - K    while IDLE, between iterations  iteration r + K
    FULLY_ASYNC   --async-steps K             an older           in any state, as soon as        iterations r to r + K
                  --fully-async               iteration          they arrive

One step ahead (K = 1), for example::

    rollout process   │ collect 0 (v0) │ collect 1 (v0) │ collect 2 (v1) │ collect 3 (v2) │
    trainer                            │ train 0 ─> v1  │ train 1 ─> v2  │ train 2 ─> v3  │

A drawn prompt group goes from IN FLIGHT (generated, scored) to READY, and then into an iteration. When an iteration has
enough groups, the leftover ones are treated according to ``LeftoverGroups``::

    leftover      flags                       groups in flight                    groups that are ready
    AWAIT         none                        awaited before the iteration ends   discarded
    CANCEL        --over-sampling-early-stop  cancelled                           discarded
    INTERRUPT     --partial-rollout           stop, and continue in the next      kept for the next iteration
                                              iteration, under its weights
    CONTINUE      --fully-async               continue, whatever weights arrive   kept for the next iteration

Under AWAIT the groups of an iteration depend on seeds and weights only. Under the other three they depend on which
response is complete first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

from miles.config.rollout import RolloutArguments


class Overlap(Enum):
    """The behavior of generation while an iteration is trained."""

    SYNCHRONOUS = auto()  # it waits
    READ_AHEAD = auto()  # the next iteration is read, as rows and files do not depend on weights
    AHEAD = auto()  # it collects the next iterations; weights change between two of them
    FULLY_ASYNC = auto()  # it never waits; weights change at any time


class LeftoverGroups(Enum):
    """The treatment of the groups that an iteration does not take."""

    AWAIT = auto()
    CANCEL = auto()
    INTERRUPT = auto()
    CONTINUE = auto()


class StaleTokens(Enum):
    """The treatment of tokens of weights that are more than K versions old."""

    KEEP = auto()  # they are trained on
    MASK = auto()  # they get loss mask 0; a group of nothing else is dropped
    DROP = auto()  # their group is dropped


@dataclass(frozen=True)
class OrderingRule:
    """The choices that a run's flags make about ordering.

    ``max_staleness`` is K. ``most_groups`` is the largest number of groups that are in flight or ready at once.
    """

    overlap: Overlap
    max_staleness: int
    leftover: LeftoverGroups
    stale_tokens: StaleTokens
    most_groups: int

    @classmethod
    def from_flags(cls, rollout: RolloutArguments, reads_samples: bool = False) -> OrderingRule:
        """Return the rule of validated flags, for samples that are generated, or ``reads_samples``."""
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        batch, burst = rollout.rollout_batch_size, rollout.over_sampling_batch_size
        if reads_samples:
            return cls(Overlap.READ_AHEAD, 1, LeftoverGroups.AWAIT, StaleTokens.KEEP, batch)
        steps = rollout.async_steps
        overlap = Overlap.AHEAD if steps else Overlap.SYNCHRONOUS
        if rollout.fully_async:
            stale = {"drop": StaleTokens.DROP, "mask": StaleTokens.MASK}[rollout.stale_samples]
            return cls(Overlap.FULLY_ASYNC, steps, LeftoverGroups.CONTINUE, stale, (steps + 1) * batch)
        if rollout.partial_rollout:
            assert burst is not None, "validate() requires --over-sampling-batch-size"
            stale = StaleTokens.MASK if rollout.mask_offpolicy_in_partial_rollout else StaleTokens.KEEP
            return cls(overlap, steps, LeftoverGroups.INTERRUPT, stale, burst)
        if rollout.over_sampling_early_stop:
            assert burst is not None, "validate() requires --over-sampling-batch-size"
            return cls(overlap, steps, LeftoverGroups.CANCEL, StaleTokens.KEEP, burst)
        if rollout.dynamic_sampling_filter_path is not None:
            assert burst is not None, "validate() fills over_sampling_batch_size"
            return cls(overlap, steps, LeftoverGroups.AWAIT, StaleTokens.KEEP, burst)
        return cls(overlap, steps, LeftoverGroups.AWAIT, StaleTokens.KEEP, batch)

    @property
    def generates_stale_tokens(self) -> bool:
        """Whether a token may come from older weights than those that train on it."""
        return self.overlap in (Overlap.AHEAD, Overlap.FULLY_ASYNC) or self.leftover is LeftoverGroups.INTERRUPT


@dataclass(frozen=True)
class Start:
    """The order to collect ``iteration``, once ``after`` is collected and by weights of ``version`` or newer.

    ``after`` is None for the first iteration that a rollout process collects.
    """

    iteration: int
    after: int | None
    version: int


class IterationPlanner:
    """Decides in the launcher what to start and when weights may change; ``RolloutGate`` obeys.

    One planner belongs to one rollout process. A process that replaces another gets a new planner.
    """

    def __init__(self, rule: OrderingRule, num_iterations: int) -> None:
        self._rule = rule
        self._num_iterations = num_iterations
        self._first_version = 0  # of the weights that the process starts with
        self._last_started: int | None = None

    def start_until(self, iteration: int) -> list[Start]:
        """Return what to start before the launcher waits for ``iteration``; every iteration is started once.

        These are ``iteration`` and, ahead of training, the K after it. Under FULLY_ASYNC the process runs ahead on its
        own.
        """
        ahead = self._rule.max_staleness if self._rule.overlap in (Overlap.AHEAD, Overlap.READ_AHEAD) else 0
        last = min(iteration + ahead, self._num_iterations - 1)
        first = iteration if self._last_started is None else self._last_started + 1
        starts = []
        for number in range(first, last + 1):
            version = max(self._first_version, number - self._rule.max_staleness)
            starts.append(Start(number, self._last_started, version))
            self._last_started = number
        return starts

    def load_weights(self, version: int) -> int | None:
        """Return the iteration that must be collected before the engine loads ``version``; None: load at once."""
        if self._last_started is None:
            self._first_version = version
        return None if self._rule.overlap is Overlap.FULLY_ASYNC else self._last_started

    @property
    def awaits_loading(self) -> bool:
        """Whether the launcher waits until the engine has loaded the weights that it was just given."""
        return self._rule.overlap is Overlap.SYNCHRONOUS or self._last_started is None


class Activity(Enum):
    """The states of a rollout process."""

    IDLE = auto()
    COLLECTING = auto()
    EVALUATING = auto()


class RolloutGate:
    """Holds back each call in the rollout process until its turn comes.

    Calls may arrive in any order. Each names its predecessor, so timing decides nothing.
    """

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._activity = Activity.IDLE
        self._collected = -1  # the last iteration that is complete
        self._version = -1  # of the engine's weights

    @property
    def version(self) -> int:
        """The version of the engine's weights; -1 before the first."""
        return self._version

    @asynccontextmanager
    async def collecting(self, start: Start) -> AsyncIterator[None]:
        """Run the block that collects an iteration. A block that fails ends the iteration, too."""

        def may_start() -> bool:
            follows = start.after is None or self._collected >= start.after
            return self._activity is Activity.IDLE and follows and self._version >= start.version

        async with self._during(Activity.COLLECTING, may_start, then_collected=start.iteration):
            yield

    @asynccontextmanager
    async def evaluating(self) -> AsyncIterator[None]:
        """Run a block while no iteration is collected: an interrupted iteration would interrupt evaluation too."""
        async with self._during(Activity.EVALUATING, lambda: self._activity is Activity.IDLE):
            yield

    @asynccontextmanager
    async def _during(
        self, activity: Activity, may_start: Callable[[], bool], then_collected: int | None = None
    ) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(may_start)
            self._activity = activity
        try:
            yield
        finally:
            async with self._changed:
                self._activity = Activity.IDLE
                if then_collected is not None:
                    self._collected = then_collected
                self._changed.notify_all()

    @asynccontextmanager
    async def loading(self, version: int, after: int | None) -> AsyncIterator[None]:
        """Run the block that loads weights of ``version``, when iteration ``after`` is collected (None: at once)."""
        async with self._changed:
            await self._changed.wait_for(lambda: after is None or self._collected >= after)
        yield
        async with self._changed:
            self._version = version
            self._changed.notify_all()
