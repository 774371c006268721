"""Reward functions by name (``--rm-type``) or import path (``--custom-rm-path``)."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.base.flags import Errors
from miles.base.user_code import UserCodeError, UserCodeTimeout, call_user_code
from miles.tasks.rewards.base import NotAReward, RewardFunction, RewardSum, as_reward
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.reward_process import RewardProcess, RewardProcessDied
from miles.tasks.rewards.settings import CUSTOM, RewardArguments, check_reward
from miles.types.sample import PromptGroup, Sample, exact_mean

_logger = logging.getLogger(__name__)


def get_reward_function(
    reward: RewardArguments, memory: int = 0, share: Callable[[int], int] = lambda total: total
) -> RewardFunction:
    """Return the run's reward function.

    A custom function takes ``samples: Sequence[Sample]``, which it must not change, and returns one finite number per
    sample, in order; with ``--reward-key KEY`` one mapping per sample, whose value at KEY is the number. It may be
    ``async``. It runs in a separate process, where several calls may run at once. A call that takes longer than
    ``--reward-timeout`` raises. Aborted and truncated samples are scored too; ``sample.status`` identifies them.

    Args:
        reward: The section.
        memory: Bytes that the processes of a custom function may use together; 0 is no limit.
        share: Returns how much of a limit of the whole run, such as requests at once, is this process's.

    Raises:
        ValueError: For no reward, two rewards, an unknown name, flags that break a rule, a path that cannot be
            imported, or a machine that does not permit a reward's work.
    """
    faults = Errors()
    check_reward(reward, True, faults)
    if faults.messages:
        raise ValueError("; ".join(faults.messages))
    shared = (limit for name in reward.weights if name in REWARDS for limit in REWARDS[name].shared_limits)
    limits: dict[str, Any] = {limit: share(getattr(reward, limit)) for limit in shared}
    reward = replace(reward, **limits)
    functions = {name: _function(name, reward, memory) for name in reward.weights}
    if reward.is_sum:
        return WeightedReward(functions, reward.weights)
    (only,) = functions.values()
    return only


def _function(name: str, reward: RewardArguments, memory: int) -> RewardFunction:
    if name != CUSTOM:
        return _BuiltIn(name, reward)
    assert reward.custom_rm_path is not None, "checked"
    return RewardProcess(reward.custom_rm_path, reward.reward_key, reward.reward_timeout, memory)


class _BuiltIn:
    def __init__(self, name: str, reward: RewardArguments) -> None:
        self.reward_name = name
        self._function = REWARDS[name].build(REWARDS[name].flags_of(reward))

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        # Without a limit: each bounds the time of an answer, and a batch may have to wait for others.
        rewards: list[float] = await call_user_code(self._function, samples, seconds=0)
        return rewards


# Several rewards as one: their weighted sum.


class WeightedReward:
    """The sum of rewards, each times its weight; a sample without one of them has none.

    Args:
        functions: The reward functions by name. They are called at the same time.
        weights: The weight of each.
    """

    def __init__(self, functions: Mapping[str, RewardFunction], weights: Mapping[str, float]) -> None:
        self.reward_name = ",".join(f"{name}:{weight:g}" for name, weight in weights.items())
        self._functions = functions
        self._weights = weights

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return a ``RewardSum`` for each sample, or ``NotAReward`` with the name of the part at fault.

        A part that raises is called again with each sample alone, and no other part is. If no sample alone fails, that
        is logged, and the rewards count.

        Raises:
            UserCodeTimeout: A part took too long; each sample alone might take as long again.
        """
        calls = (_part(name, function, samples) for name, function in self._functions.items())
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # none is left behind if one raises
        for column in outcomes:
            if isinstance(column, BaseException):
                raise column
        columns: dict[str, Any] = dict(zip(self._functions, outcomes, strict=True))
        results: list[Any] = [
            self._sum({name: column[row] for name, column in columns.items()}) for row in range(len(samples))
        ]
        return results

    def _sum(self, parts: Mapping[str, Any]) -> RewardSum | NotAReward:
        numbers: dict[str, float] = {}
        for name, value in parts.items():
            number = value if isinstance(value, NotAReward) else as_reward(value)
            if isinstance(number, NotAReward):
                return NotAReward(number if number.startswith(f"{name} ") else f"{name} {number}")
            numbers[name] = number
        return RewardSum(sum(self._weights[name] * value for name, value in numbers.items()), numbers)


async def _part(name: str, function: RewardFunction, samples: Sequence[Sample]) -> Sequence[Any]:
    """Call ``function``; if it raises, with each sample alone."""
    try:
        return await _named(name, function, samples)
    except (UserCodeError, RewardProcessDied) as error:
        if len(samples) == 1:
            return [NotAReward(error)]
        results = [await _alone(name, function, sample) for sample in samples]
        if not any(isinstance(result, NotAReward) for result in results):
            _logger.warning("scored one by one, which succeeded: %s", error)
        return results


async def _alone(name: str, function: RewardFunction, sample: Sample) -> Any:
    try:
        return (await _named(name, function, [sample]))[0]
    except (UserCodeError, RewardProcessDied) as error:
        return NotAReward(error)


async def _named(name: str, function: RewardFunction, samples: Sequence[Sample]) -> Sequence[Any]:
    """Call ``function``, and say in the message of an error which reward it was."""
    try:
        results = await function(samples)
    except (UserCodeError, UserCodeTimeout, RewardProcessDied) as error:
        raise type(error)(f"{name} {error}") from error
    except Exception as error:
        raise UserCodeError(f"{name} raised {type(error).__name__}: {error}") from error
    if len(results) != len(samples):
        raise UserCodeError(f"{name} returned {len(results)} rewards for {len(samples)} samples; return one per sample")
    return results


# Whether a trajectory passes, which is what pass@k and ``--max-prompt-pass-rate`` count.


PASS_REWARD = 1.0  # a trajectory passes with this reward or more


def deciding_part(names: Iterable[str]) -> str | None:
    """Return the part of a sum of rewards that decides whether a trajectory passes; None if no part can.

    It is the first built-in one that reads the prompt's row, such as its label, else the user's own. The others, such
    as ``format`` and ``length``, say nothing of whether an answer is right.

    >>> deciding_part(["repetition", "custom", "math", "f1"]), deciding_part(["format", "length"])
    ('math', None)
    """
    names = list(names)
    reading = (name for name in names if name in REWARDS and REWARDS[name].reads_row)
    return next(reading, CUSTOM if CUSTOM in names else None)


def deciding_reward(sample: Sample) -> float:
    """Return the number of a scored sample that decides: its reward, or the ``deciding_part`` of a sum.

    If no part of a sum decides, the sum itself does, as in a run with a single reward.
    """
    assert sample.reward is not None, "the sample has been scored"
    part = deciding_part(sample.reward_parts)
    return sample.reward if part is None else sample.reward_parts[part]


def passes(trajectory: Sequence[Sample]) -> bool:
    """Return whether a scored trajectory passes: the mean ``deciding_reward`` of its samples is 1 or more."""
    return exact_mean(map(deciding_reward, trajectory)) >= PASS_REWARD


def passes_of(group: PromptGroup) -> list[bool]:
    """Return whether each trajectory of a group passes; those dropped by ``--reward-error drop`` do not."""
    return [*map(passes, group.trajectories), *[False] * group.dropped_trajectories]
