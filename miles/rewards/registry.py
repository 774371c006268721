"""Reward functions by name (``--rm-type``) or import path (``--custom-rm-path``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from miles.arguments.reward import BUILT_IN_REWARDS, RewardArguments
from miles.import_path import load_function
from miles.rewards.base import RewardFunction
from miles.rewards.user_code import call_user_code
from miles.sample import Sample


def get_reward_function(reward: RewardArguments) -> RewardFunction:
    """Return the run's reward function.

    A custom function takes ``samples: Sequence[Sample]``, which it must not change, and returns one finite number per
    sample, in order; with ``--reward-key KEY`` one mapping per sample, whose value at KEY is the number. It may be
    ``async``; either way it runs outside the event loop of generation, so that it cannot block it, and several calls
    may run at once. A call that takes longer than ``--reward-timeout`` raises. Aborted and truncated samples are scored
    too; ``sample.status`` identifies them.

    Raises:
        ValueError: For no reward, two rewards, an unknown name, or a path that cannot be imported.
    """
    key = reward.reward_key
    if reward.rm_type is not None and reward.custom_rm_path is not None:
        raise ValueError(
            f"--rm-type {reward.rm_type}: would be ignored beside --custom-rm-path {reward.custom_rm_path}; drop one"
        )
    if reward.custom_rm_path is not None:
        function = load_function(reward.custom_rm_path, "--custom-rm-path")
        bounded = _bounded(function, reward)
        return _with_key(bounded, key) if key is not None else bounded
    if reward.rm_type is None:
        raise ValueError(
            f"no reward: give --rm-type ({', '.join(BUILT_IN_REWARDS)}) or --custom-rm-path module:function"
        )
    if key is not None:
        raise ValueError(
            f"--reward-key {key}: would be ignored, as --rm-type {reward.rm_type} gives plain numbers; drop it"
        )
    return _bounded(_built_in(reward.rm_type), reward)


def _built_in(name: str) -> Callable[..., Any]:
    if name not in BUILT_IN_REWARDS:
        near = get_close_matches(name, BUILT_IN_REWARDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"--rm-type {name}: no such reward; {hint}the built-in ones are {', '.join(BUILT_IN_REWARDS)}; "
            f"for your own give --custom-rm-path module:function"
        )
    return load_function(f"miles.rewards.built_in.{name}:{name}", f"--rm-type {name}:")


def _bounded(function: Callable[..., Any], reward: RewardArguments) -> RewardFunction:
    async def call(samples: Sequence[Sample]) -> list[float]:
        rewards: list[float] = await call_user_code(function, samples, seconds=reward.reward_timeout)
        return rewards

    return call


def _with_key(function: RewardFunction, key: str) -> RewardFunction:
    async def pick(samples: Sequence[Sample]) -> list[float]:
        return [_value(result, key) for result in await function(samples)]

    return pick


def _value(result: Any, key: str) -> float:
    if not isinstance(result, Mapping):
        raise ValueError(f"--reward-key {key}: the reward function returned {result!r}, not an object; drop the flag")
    if key not in result:
        raise ValueError(f"--reward-key {key}: the result has only the keys {', '.join(map(str, result))}; name one")
    value: float = result[key]
    return value
