"""The groups of an iteration, taken as they complete: nobody waits for the slowest response."""

import asyncio
from collections.abc import Iterator
from typing import Any

from miles.base.threads import cancel_all
from miles.base.user_code import as_exception
from miles.config.rollout import RolloutArguments
from miles.engine.base import Engine
from miles.rollout.collect import GroupCollector, ProduceGroup, ScoredGroups, Tally, draw_up_to
from miles.rollout.filters import FilterStallGuard
from miles.rollout.groups import ProducedGroup
from miles.rollout.hooks import BufferFilter
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.rollout.ordering import LeftoverGroups, OrderingRule, StaleTokens
from miles.rollout.workers.pool import WorkerPool
from miles.tasks.data.stream import NoPromptsLeft, TrainingStream
from miles.tasks.rewards.settings import RewardArguments
from miles.types.metrics import Metric
from miles.types.sample import NO_WEIGHTS, PromptGroup, Sample


class StreamCollector(GroupCollector):
    """Collects the first ``--rollout-batch-size`` groups that are ready, lowest ``group_index`` first among those.

    With ``--buffer-filter-path`` the user's function picks among those that are ready.

    ``OrderingRule`` states how many groups may be in flight or ready, and what happens to those that an iteration
    leaves over. Ready groups wait in memory. At any time a drawn prompt is in flight, ready, released, or dropped and
    counted, so ``state`` can list the prompts that are in no iteration yet.

    The groups of an iteration depend on which response is complete first. ``BurstCollector`` is for runs that repeat
    exactly.
    """

    _stream: TrainingStream

    def __init__(
        self,
        stream: TrainingStream,
        produce: ProduceGroup,
        rollout: RolloutArguments,
        reward: RewardArguments,
        rule: OrderingRule,
        *,
        num_iterations: int,
        engine: Engine,
        interruptible: InterruptibleEngine | WorkerPool | None = None,
        buffer_filter: BufferFilter | None = None,
    ) -> None:
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        assert rule.leftover is not LeftoverGroups.AWAIT, "that is what BurstCollector does"
        assert (interruptible is not None) == (rule.leftover is LeftoverGroups.INTERRUPT)
        super().__init__(stream)
        path = rollout.dynamic_sampling_filter_path
        self._produce = produce
        self._log_passrate = reward.log_passrate
        self._batch_size = rollout.rollout_batch_size
        self._rule = rule
        self._num_iterations = num_iterations
        self._engine = engine
        self._interruptible = interruptible
        self._guard = (
            FilterStallGuard(stream, path, self._batch_size, self._batch_size) if path or reward.drops_errors else None
        )
        self._in_flight: dict[asyncio.Task[ProducedGroup], int] = {}  # with their group_index
        self._ready: list[PromptGroup] = []
        self._picked: list[PromptGroup] = []  # by the user's function, for the iteration that is being collected
        self._buffer_filter = buffer_filter
        self._tally = Tally()
        self._dropped: list[int] = []  # group indices since the last iteration: no metric has counted them yet
        self._failure: Exception | None = None
        self._no_prompts: NoPromptsLeft | None = None
        self._changed = asyncio.Event()
        self._starts_groups = False
        self._iteration = 0  # the next one to be complete
        self._version = 0  # of the engine's weights

    async def collect(self, iteration: int) -> ScoredGroups:
        """Return the groups and metrics of ``iteration``, which weights of that version train on.

        Raises:
            NoPromptsLeft: Too few prompts are left to fill it.
            ValueError: The filter keeps almost nothing (``FilterStallGuard``).
            Exception: Whatever generation, the reward function and the filter raise.
        """
        self._iteration = iteration
        self._starts_groups = True
        self._drop_stale()
        if self._interruptible is not None:
            self._interruptible.continue_generation()
        try:
            await self._until_complete()
        except BaseException:
            await self._cancel()
            raise
        groups = sorted(self._picked, key=lambda group: group.group_index)
        self._picked = []
        generated = tuple(self._tally.generated)
        metrics = self._release(groups)
        metrics |= await self._settle_leftover()
        return ScoredGroups(groups, metrics, generated)

    async def _until_complete(self) -> None:
        while True:
            if self._failure is not None:
                raise self._failure
            if self._guard is not None:
                self._guard.check(self._iteration, len(self._ready), self._tally.dropped)
            self._pick()
            if len(self._picked) == self._batch_size:
                return
            self._fill()
            if self._no_prompts is not None and not self._in_flight:
                raise self._no_prompts
            if self._buffer_filter is not None and not self._in_flight:
                missing = self._batch_size - len(self._picked)
                raise self._buffer_filter.stuck(self._iteration, len(self._ready), missing)
            assert self._in_flight, "an incomplete iteration has groups in flight"
            self._changed.clear()
            await self._changed.wait()

    def _pick(self) -> None:
        """Take the iteration's groups from those that are ready, once these can fill it: the first, or by choice."""
        while 0 < (missing := self._batch_size - len(self._picked)) <= len(self._ready):
            self._ready.sort(key=lambda group: group.group_index)
            if self._buffer_filter is None:
                self._picked, self._ready = self._ready[:missing], self._ready[missing:]
                return
            result = self._buffer_filter.pick(self._iteration, self._ready, missing)
            self._picked += result.picked
            self._ready = result.waiting
            if result.dropped:
                self._tally.dropped["buffer_filter"] += len(result.dropped)
                self._dropped += [group.group_index for group in result.dropped]
            if not result.picked and not result.dropped:
                return

    def _fill(self) -> None:
        """Start groups up to the limit."""
        room = self._limit() - len(self._in_flight) - len(self._ready) - len(self._picked)
        if self._starts_groups and room > 0:
            try:
                groups = draw_up_to(room, self._stream)
            except NoPromptsLeft as error:  # the groups in flight may still fill the iteration
                self._no_prompts = error
                return
            for drawn in groups:
                task: asyncio.Task[ProducedGroup] = asyncio.ensure_future(self._produce(drawn))
                self._in_flight[task] = drawn.group_index
                task.add_done_callback(self._ended)

    def _limit(self) -> int:
        """Return how many groups may be in flight or ready.

        Under CONTINUE these are no more than the current weights may generate within the bound on staleness, if
        iterations take the oldest groups: the groups of iterations up to version + max_staleness.
        """
        if self._rule.leftover is not LeftoverGroups.CONTINUE:
            return self._rule.most_groups
        iterations = min(self._version + self._rule.max_staleness + 1, self._num_iterations) - self._iteration
        return min(iterations * self._batch_size, self._rule.most_groups)

    def _ended(self, task: asyncio.Task[ProducedGroup]) -> None:
        """Take in a group that is produced. Note the first failure for ``collect``: asyncio would only log it."""
        index = self._in_flight.pop(task)
        try:
            if not (task.cancelled() and task.cancelling()):  # a CancelledError that nobody asked for is a failure
                self._take_in(task.result())
        except BaseException as error:
            self._failure = self._failure or as_exception(error, f"the code that makes group {index}")
        finally:
            self._changed.set()

    def _take_in(self, produced: ProducedGroup) -> None:
        self._tally.add(produced)
        if self._guard is not None:
            self._guard.count(passed=produced.drop_reason is None)
        if produced.drop_reason is None:
            self._ready.append(produced.group)
            self._drop_stale(since=len(self._ready) - 1)
        else:
            self._dropped.append(produced.group.group_index)
        self._fill()

    def _drop_stale(self, since: int = 0) -> None:
        """Drop the ready groups, from position ``since`` on, that the next iteration must not train on.

        If stale tokens are masked, those are the groups that would have no loss token left.
        """
        if self._rule.stale_tokens is StaleTokens.KEEP:
            return
        is_stale = {StaleTokens.DROP: _is_older, StaleTokens.MASK: _is_wholly_older}[self._rule.stale_tokens]
        oldest = self._iteration - self._rule.max_staleness
        newly_ready = self._ready[since:]
        dropped = {group.group_index for group in newly_ready if is_stale(group, oldest)}
        if dropped:
            self._tally.dropped["stale"] += len(dropped)
            self._dropped += dropped
            self._ready[since:] = [group for group in newly_ready if group.group_index not in dropped]

    def _release(self, groups: list[PromptGroup]) -> dict[str, Metric]:
        metrics = self._tally.metrics(groups, self._log_passrate)
        self._tally = Tally()
        self._dropped.clear()
        if self._rule.stale_tokens is StaleTokens.MASK:
            oldest = self._iteration - self._rule.max_staleness
            masked = sum(_mask_older(group, oldest) for group in groups)
            metrics["rollout/masked_stale_tokens"] = Metric(masked, 1.0)
        return metrics

    async def _settle_leftover(self) -> dict[str, Metric]:
        """Treat the leftover groups as the rule states, and count them."""
        left = {
            "rollout/unfinished_groups": Metric(len(self._in_flight), 1.0),
            "rollout/surplus_groups": Metric(len(self._ready), 1.0),
        }
        self._starts_groups = self._rule.leftover is LeftoverGroups.CONTINUE
        if self._rule.leftover is LeftoverGroups.CANCEL:
            await self._cancel()
            await self._engine.abort()  # servers do not notice that nobody waits
            self._ready.clear()
            # Groups that ended while they were cancelled are counted as unfinished; no later iteration has them.
            self._tally = Tally()
            self._dropped.clear()
        if self._rule.leftover is LeftoverGroups.INTERRUPT:
            assert self._interruptible is not None
            await self._interruptible.interrupt()
        self._iteration += 1
        self._fill()
        return left

    async def _cancel(self) -> None:
        self._starts_groups = False
        await cancel_all(self._in_flight)

    @property
    def progress(self) -> tuple[int, int]:
        """As in ``GroupCollector``."""
        return min(len(self._ready) + len(self._picked), self._batch_size), self._batch_size

    def state(self) -> dict[str, Any]:
        """Return the position in the prompts, with the groups that are in flight or ready.

        Groups that were dropped since the last iteration are drawn again too: no metric has counted them yet.
        """
        ready = (group.group_index for group in (*self._picked, *self._ready))
        return self._stream.state([*self._in_flight.values(), *ready, *self._dropped])

    def weights_changed(self, version: int) -> None:
        """Start more groups: newer weights may serve later iterations."""
        self._version = version
        self._fill()


def _trained_versions(sample: Sample) -> Iterator[int]:
    """Yield the version of the weights behind each loss token, if it was recorded."""
    for version, mask in zip(sample.weight_versions, sample.loss_mask, strict=False):  # versions may not be recorded
        if mask and version != NO_WEIGHTS:
            yield version


def _is_older(group: PromptGroup, version: int) -> bool:
    """Return whether a loss token is by weights older than ``version``."""
    return any(actual < version for sample in group.samples for actual in _trained_versions(sample))


def _is_wholly_older(group: PromptGroup, version: int) -> bool:
    """Return whether every loss token is by weights older than ``version``."""
    versions = [actual for sample in group.samples for actual in _trained_versions(sample)]
    return bool(versions) and max(versions) < version


def _mask_older(group: PromptGroup, version: int) -> int:
    """Set the loss mask of tokens by weights older than ``version`` to 0; return how many there were."""
    masked = 0
    for sample in group.samples:
        for position, actual in enumerate(sample.weight_versions):
            if sample.loss_mask[position] and NO_WEIGHTS != actual < version:
                sample.loss_mask[position] = 0
                masked += 1
    return masked
