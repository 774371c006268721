"""Groups until a rollout is full: generate, score, filter, refill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.concurrency import gather_or_cancel
from miles.metrics import Metric
from miles.rollout.filter_stall import FilterStallGuard
from miles.rollout.produce_group import GroupMaker, Tally
from miles.sample import PromptGroup


class PromptSource(Protocol):
    """Prompts, drawn by rising ``group_index``. ``epoch``: the pass that the last drawn one belongs to.

    ``state(unfinished)`` is a position to resume from, at which the groups of these indices are drawn again.
    """

    @property
    def epoch(self) -> int: ...

    def draw(self, n: int) -> list[PromptGroup]: ...

    def state(self, unfinished: Any = ()) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Rollout:
    """The groups to train on, by ``group_index``, and what there is to say about them."""

    groups: list[PromptGroup]
    metrics: dict[str, Metric]


class RolloutSource(Protocol):
    """Where rollouts come from: a collector, or the user's ``--rollout-function-path``."""

    async def collect(self, iteration: int) -> Rollout:
        """The groups and metrics of rollout ``iteration``, counted from 0. Called for one rollout after the other."""
        ...

    def state(self) -> dict[str, Any]:
        """The position in the prompts: a run that resumes from it trains on every prompt that no rollout has given."""
        ...

    def weights_arrived(self, version: int) -> None:
        """The engine generates with the weights of ``version`` from now on."""
        ...


class Collector:
    """Collects rollouts of ``--rollout-batch-size`` scored groups.

    Prompts are submitted in bursts, all groups of a burst at once; each group is scored as soon as it is generated.
    Without a filter one burst is the rollout. With one, bursts of ``--over-sampling-batch-size`` prompts follow one
    another until enough groups are kept.

    Which groups are kept depends on the seeds and weights only, never on which response came first: a burst is always
    awaited to its end, and the first groups by ``group_index`` make the rollout. Surplus groups are discarded and
    counted (``rollout/surplus_groups``) rather than kept for the next rollout, where they would be off-policy.
    (``StreamCollector`` is for those who would rather not wait.)
    """

    def __init__(
        self, stream: PromptSource, make_group: GroupMaker, rollout: RolloutArguments, reward: RewardArguments
    ) -> None:
        assert rollout.rollout_batch_size is not None, "validate() requires --rollout-batch-size"
        path = rollout.dynamic_sampling_filter_path
        self._stream = stream
        self._make_group = make_group
        self._log_passrate = reward.log_passrate
        self._batch_size = rollout.rollout_batch_size
        self._burst_size = (rollout.over_sampling_batch_size or self._batch_size) if path else self._batch_size
        self._watch = FilterStallGuard(stream, path, self._burst_size, self._batch_size) if path else None

    async def collect(self, iteration: int) -> Rollout:
        """The groups and metrics of rollout ``iteration``, counted from 0.

        Raises ``ValueError`` when the filter keeps next to nothing (``FilterStallGuard``), and whatever generation,
        scoring and filtering raise.
        """
        kept: list[PromptGroup] = []
        tally = Tally()
        while len(kept) < self._batch_size:
            drawn = self._stream.draw(self._burst_size)  # in the order of group_index, as everything from here on
            for made in await gather_or_cancel(self._make_group(group) for group in drawn):
                tally.add(made)
                if made.drop_reason is None:
                    kept.append(made.group)
                if self._watch is not None:
                    self._watch.judged(kept=made.drop_reason is None)
            if self._watch is not None:
                self._watch.check(iteration, len(kept), tally.dropped)
        groups = kept[: self._batch_size]
        metrics = tally.metrics(groups, self._log_passrate)
        if self._watch is not None:
            metrics["rollout/surplus_groups"] = Metric(len(kept) - len(groups), 1.0)
        return Rollout(groups, metrics)

    def state(self) -> dict[str, Any]:
        """Between two rollouts nothing is under way, so the stream's position says it all."""
        return self._stream.state()

    def weights_arrived(self, version: int) -> None:
        """Each rollout is generated with the weights that are there."""
