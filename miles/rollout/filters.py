"""Dynamic sampling (DAPO, arXiv 2503.14476 §3.2): which scored groups are trained on, and when to stop trying."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from miles.base.user_code import load_function
from miles.tasks.data.stream import TrainingStream
from miles.tasks.rewards.registry import deciding_reward
from miles.types.sample import PromptGroup

_FLAG = "--dynamic-sampling-filter-path"

MIN_STALLED_BURSTS = 10  # a small prompt set is passed quickly: allow a few tries
MAX_STALLED_BURSTS = 100  # a large one is never passed: stop anyway


@dataclass(frozen=True)
class FilterDecision:
    """Whether to keep the group. ``reason`` is a short name: drops are counted as ``rollout/dropped/<reason>``."""

    keep: bool
    reason: str = ""


class GroupFilter(Protocol):
    """Judges one generated and scored group, which it must not change. A plain bool (keep?) is accepted too."""

    def __call__(self, group: PromptGroup) -> FilterDecision | bool:
        """Return whether to keep ``group``."""


def check_reward_nonzero_std(group: PromptGroup) -> FilterDecision:
    """Drop a group whose rewards are all equal: its group-relative advantages are zero."""
    return FilterDecision(keep=has_reward_spread(group), reason="zero_std")


def check_deciding_reward_nonzero_std(group: PromptGroup) -> FilterDecision:
    """Drop a group whose answers are all equally right (``deciding_reward``), though a penalty may tell them apart.

    DAPO's authors compare the accuracies, without the penalty on length (``filter_groups.metric=acc`` in verl).
    """
    return FilterDecision(keep=differ(map(deciding_reward, group.samples)), reason="zero_std")


def has_reward_spread(group: PromptGroup) -> bool:
    """Return whether samples of the group have different rewards, so that an estimator can give one an advantage.

    Samples of one trajectory may be rewarded separately, and differ even if all trajectories have the same mean.
    """
    return differ(group.rewards)


def differ(rewards: Iterable[float]) -> bool:
    """Return whether rewards differ. They are compared exactly: a computed deviation may round to zero."""
    return len(set(rewards)) > 1


def load_group_filter(path: str) -> Callable[[PromptGroup], FilterDecision]:
    """Return the filter named by ``--dynamic-sampling-filter-path``, wrapped so that its answers are checked.

    A drop without a reason is counted under ``filtered``.

    Raises:
        ValueError: The path cannot be imported. When called: the answer is neither a ``FilterDecision`` nor a bool.
    """
    function: GroupFilter = load_function(path, _FLAG)

    def decide(group: PromptGroup) -> FilterDecision:
        answer = function(group)
        if isinstance(answer, bool):
            answer = FilterDecision(keep=answer)
        if not isinstance(answer, FilterDecision):
            raise ValueError(
                f"{_FLAG} {path}: the filter returned {answer!r} for group {group.group_index} "
                f"({group.prompt.source}); return miles.rollout.filters.FilterDecision(keep, reason), or a bool"
            )
        return answer if answer.keep or answer.reason else FilterDecision(keep=False, reason="filtered")

    return decide


class FilterStallGuard:
    """Stops a run whose filter keeps no group for a long time, or whose reward function fails on every sample.

    Groups are counted in bursts of ``burst_size``. A burst without a kept group is stalled.
    """

    def __init__(self, stream: TrainingStream, filter_path: str | None, burst_size: int, batch_size: int) -> None:
        self._stream = stream
        self._flag = "--reward-error drop" if filter_path is None else f"{_FLAG} {filter_path}"
        self._burst_size = burst_size
        self._batch_size = batch_size
        self._counted = 0  # groups of the current burst
        self._passed_in_burst = 0
        self._stalled_bursts = 0  # in a row, up to now
        self._since_epoch = 0  # the epoch where the first of them started
        self._burst_epoch = 0  # the epoch where the current burst started

    def count(self, passed: bool) -> None:
        """Count one group that the filter passed or dropped."""
        if self._counted == 0:
            self._burst_epoch = self._stream.epoch
        self._counted += 1
        self._passed_in_burst += passed
        if self._counted == self._burst_size:
            self._end_burst()

    def _end_burst(self) -> None:
        if self._passed_in_burst:
            self._stalled_bursts = 0
        else:
            if self._stalled_bursts == 0:
                self._since_epoch = self._burst_epoch
            self._stalled_bursts += 1
        self._counted = self._passed_in_burst = 0

    def check(self, iteration: int, num_groups: int, dropped: Counter[str]) -> None:
        """Stop the run if the stall is too long.

        Args:
            iteration: The iteration that is being collected.
            num_groups: The groups it has so far.
            dropped: The number of groups dropped for it so far, by reason.

        Raises:
            ValueError: The last ``MIN_STALLED_BURSTS`` or more bursts are stalled and saw every prompt, or
                ``MAX_STALLED_BURSTS`` are stalled.
        """
        # The stall started somewhere within its first epoch, so the next epoch is the first that it saw completely.
        saw_every_prompt = self._stream.epoch >= self._since_epoch + 2
        bursts = self._stalled_bursts
        if bursts < MIN_STALLED_BURSTS or not (saw_every_prompt or bursts >= MAX_STALLED_BURSTS):
            return
        drops = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
        raise ValueError(
            f"{self._flag}: iteration {iteration} has {num_groups} of {self._batch_size} groups, and it "
            f"kept none of the last {bursts} bursts of {self._burst_size} prompts (dropped for this iteration: "
            f"{drops}); check the reward, give prompts that the model solves sometimes, raise --n-samples-per-prompt, "
            "or remove the filter"
        )
