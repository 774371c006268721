"""Several rewards as one: their weighted sum."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Real
from typing import Any

from miles.rewards.base import NotAReward, RewardFunction, RewardSum
from miles.rewards.reward_process import RewardProcessDied
from miles.rewards.user_code import UserCodeError, UserCodeTimeout
from miles.sample import Sample


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
        """Return a ``RewardSum`` for each sample, or ``NotAReward`` with the name of the part at fault."""
        calls = (_named(name, function, samples) for name, function in self._functions.items())
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
        for name, value in parts.items():
            if not isinstance(value, Real) or not isfinite(value):
                fault = value if isinstance(value, NotAReward) else f"returned {value!r:.80}, not a finite number"
                return NotAReward(f"{name} {fault}")
        numbers = {name: float(value) for name, value in parts.items()}
        return RewardSum(sum(self._weights[name] * value for name, value in numbers.items()), numbers)


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
