"""Several rewards as one: their weighted sum."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from miles.base.user_code.calls import UserCodeTimeout
from miles.base.user_code.errors import UserCodeError
from miles.tasks.rewards.base import NotAReward, RewardFunction, RewardSum, as_reward
from miles.tasks.rewards.reward_process import RewardProcessDied
from miles.types.sample import Sample

_logger = logging.getLogger(__name__)


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
        found = await asyncio.gather(*calls, return_exceptions=True)  # none is left behind if one raises
        for column in found:
            if isinstance(column, BaseException):
                raise column
        columns: dict[str, Any] = dict(zip(self._functions, found, strict=True))
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
