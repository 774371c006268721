"""Groups released as they complete: a rollout is full as soon as enough of those in flight are done."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.metrics import Metric
from miles.rollout.collect import PromptSource, Rollout
from miles.rollout.filter_stall import FilterStallGuard
from miles.rollout.off_policy import is_older, is_wholly_older, mask_older
from miles.rollout.produce_group import GroupMaker, MadeGroup, Tally
from miles.sample import PromptGroup


class LeftoverGroups(Enum):
    """What becomes of the groups in flight when a rollout is full."""

    CANCEL = auto()  # --over-sampling-early-stop: they are given up, and so are finished ones that are not needed
    INTERRUPT = auto()  # --partial-rollout: they wait, and go on in the next rollout under its weights
    RUN_ON = auto()  # --fully-async: they go on


class Interruptible(Protocol):
    """Generation that can stop and go on (``InterruptibleEngine``)."""

    async def interrupt(self) -> None: ...

    def go_on(self) -> None: ...


class Abortable(Protocol):
    """An engine, as far as it is told to stop."""

    async def abort(self) -> None: ...


@dataclass(frozen=True)
class StreamPlan:
    """How many groups are in play at once, and what happens to those that a rollout does not take.

    ``max_staleness``: weight versions by which a token may be behind those trained; ``mask_stale``: older tokens get
    loss mask 0, and groups of nothing else are dropped; ``drop_stale``: groups that hold one are dropped.
    """

    leftover_groups: LeftoverGroups
    in_play: int  # groups in flight or finished, at most
    max_staleness: int
    mask_stale: bool = False
    drop_stale: bool = False

    @classmethod
    def of(cls, rollout: RolloutArguments) -> StreamPlan | None:
        """As the flags say; None where rollouts are collected in bursts that are awaited (``Collector``)."""
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        batch, over_sampled = rollout.rollout_batch_size, rollout.over_sampling_batch_size or rollout.rollout_batch_size
        stale = rollout.async_steps
        if rollout.fully_async:
            mask = rollout.stale_samples == "mask"
            return cls(LeftoverGroups.RUN_ON, (stale + 1) * batch, stale, mask_stale=mask, drop_stale=not mask)
        if rollout.partial_rollout:
            return cls(
                LeftoverGroups.INTERRUPT, over_sampled, stale, mask_stale=rollout.mask_offpolicy_in_partial_rollout
            )
        if rollout.over_sampling_early_stop:
            return cls(LeftoverGroups.CANCEL, over_sampled, stale)
        return None


class StreamCollector:
    """Collects rollouts of the first ``--rollout-batch-size`` groups to be done, oldest first among those.

    Nobody waits for a long response: the plan says how many groups are in play, and what becomes of those that a
    rollout leaves over. Finished groups wait in memory; a drawn prompt is at any time in flight, waiting, released or
    dropped and counted, so that ``state`` can name those that have not come to anything yet.

    Which groups make a rollout depends on which response came first. ``Collector`` is for runs that are to repeat.
    """

    def __init__(
        self,
        stream: PromptSource,
        make_group: GroupMaker,
        rollout: RolloutArguments,
        reward: RewardArguments,
        plan: StreamPlan,
        *,
        num_iterations: int,
        engine: Abortable,
        interruptible: Interruptible | None = None,
    ) -> None:
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        assert (interruptible is not None) == (plan.leftover_groups is LeftoverGroups.INTERRUPT)
        path = rollout.dynamic_sampling_filter_path
        self._stream = stream
        self._make_group = make_group
        self._log_passrate = reward.log_passrate
        self._batch_size = rollout.rollout_batch_size
        self._plan = plan
        self._num_iterations = num_iterations
        self._engine = engine
        self._interruptible = interruptible
        self._watch = FilterStallGuard(stream, path, self._batch_size, self._batch_size) if path else None
        self._in_flight: dict[asyncio.Task[MadeGroup], int] = {}  # and the group_index it makes
        self._ready: list[PromptGroup] = []
        self._tally = Tally()
        self._dropped: list[int] = []  # group indices, since the last rollout: no metric tells of them yet
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()
        self._open = False  # may new groups be started?
        self._iteration = 0  # of the rollout that is next to be full
        self._version = 0

    async def collect(self, iteration: int) -> Rollout:
        """The groups and metrics of rollout ``iteration``, to be trained by weights of that version.

        Raises ``ValueError`` when the filter keeps next to nothing (``FilterStallGuard``), and whatever generation,
        scoring and filtering raise.
        """
        self._iteration = iteration
        self._open = True
        self._drop_stale()
        if self._interruptible is not None:
            self._interruptible.go_on()
        try:
            await self._until_full()
        except BaseException:
            await self._cancel()
            raise
        self._ready.sort(key=lambda group: group.group_index)
        groups, self._ready = self._ready[: self._batch_size], self._ready[self._batch_size :]
        metrics = self._release(groups)
        metrics |= await self._settle()
        return Rollout(groups, metrics)

    async def _until_full(self) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._watch is not None:
                self._watch.check(self._iteration, len(self._ready), self._tally.dropped)
            if len(self._ready) >= self._batch_size:
                return
            self._fill()
            assert self._in_flight, "a rollout that is not full has groups in flight"
            self._changed.clear()
            await self._changed.wait()

    def _fill(self) -> None:
        """Start groups up to what may be in play."""
        missing = self._most_in_play() - len(self._in_flight) - len(self._ready)
        if self._open and missing > 0:
            for drawn in self._stream.draw(missing):
                task: asyncio.Task[MadeGroup] = asyncio.ensure_future(self._make_group(drawn))
                self._in_flight[task] = drawn.group_index
                task.add_done_callback(self._ended)

    def _most_in_play(self) -> int:
        """Under RUN_ON no more than the weights of now may serve within the staleness bound, if rollouts take the
        oldest groups: those of rollouts up to version + max_staleness."""
        if self._plan.leftover_groups is not LeftoverGroups.RUN_ON:
            return self._plan.in_play
        rollouts = min(self._version + self._plan.max_staleness + 1, self._num_iterations) - self._iteration
        return min(rollouts * self._batch_size, self._plan.in_play)

    def _ended(self, task: asyncio.Task[MadeGroup]) -> None:
        """A group is made, or has failed."""
        del self._in_flight[task]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failure = self._failure or error
        else:
            self._take_in(task.result())
        self._changed.set()

    def _take_in(self, made: MadeGroup) -> None:
        self._tally.add(made)
        if self._watch is not None:
            self._watch.judged(kept=made.drop_reason is None)
        if made.drop_reason is None:
            self._ready.append(made.group)
            self._drop_stale(since=len(self._ready) - 1)
        else:
            self._dropped.append(made.group.group_index)
        self._fill()

    def _drop_stale(self, since: int = 0) -> None:
        """Drop the ready groups, from position ``since`` on, that the next rollout must not train on.

        Where stale tokens are masked, those are the groups of which nothing would be left.
        """
        if not (self._plan.drop_stale or self._plan.mask_stale):
            return
        is_stale = is_older if self._plan.drop_stale else is_wholly_older
        oldest = self._iteration - self._plan.max_staleness
        judged = self._ready[since:]
        dropped = {group.group_index for group in judged if is_stale(group, oldest)}
        if dropped:
            self._tally.dropped["stale"] += len(dropped)
            self._dropped += dropped
            self._ready[since:] = [group for group in judged if group.group_index not in dropped]

    def _release(self, groups: list[PromptGroup]) -> dict[str, Metric]:
        metrics = self._tally.metrics(groups, self._log_passrate)
        self._tally = Tally()
        self._dropped.clear()
        if self._plan.mask_stale:
            oldest = self._iteration - self._plan.max_staleness
            masked = sum(mask_older(group, oldest) for group in groups)
            metrics["rollout/masked_stale_tokens"] = Metric(masked, 1.0)
        return metrics

    async def _settle(self) -> dict[str, Metric]:
        """Do with what is left over as the plan says, and count it."""
        left = {
            "rollout/unfinished_groups": Metric(len(self._in_flight), 1.0),
            "rollout/surplus_groups": Metric(len(self._ready), 1.0),
        }
        self._open = self._plan.leftover_groups is LeftoverGroups.RUN_ON
        if self._plan.leftover_groups is LeftoverGroups.CANCEL:
            await self._cancel()
            await self._engine.abort()  # servers learn only so that nobody waits any more
            self._ready.clear()
            # What ended while it was cancelled is among the unfinished, which are counted; no later rollout has it.
            self._tally = Tally()
            self._dropped.clear()
        elif self._interruptible is not None:
            await self._interruptible.interrupt()
        self._iteration += 1
        self._fill()
        return left

    async def _cancel(self) -> None:
        self._open = False
        tasks = list(self._in_flight)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def state(self) -> dict[str, Any]:
        """The position in the prompts, with the groups that are in flight or wait.

        Those that were dropped since the last rollout are drawn again too: no metric has counted them yet.
        """
        waiting = (group.group_index for group in self._ready)
        return self._stream.state([*self._in_flight.values(), *waiting, *self._dropped])

    def weights_arrived(self, version: int) -> None:
        """Newer weights may serve later rollouts: more groups come into play."""
        self._version = version
        self._fill()
