"""The reward function of a run on a tiny random model: the user's, with a difference within each group.

Random answers mostly get the same reward, so that no advantage and no gradient is left to check. If all answers of a
call have one reward, every second one gets 1 more.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from miles.base.flags import changed
from miles.base.user_code.loading import import_function
from miles.tasks.rewards.registry import get_reward_function
from miles.tasks.rewards.settings import RewardArguments
from miles.types.sample import Sample

MODULE = "miles_smoke_reward"


def write_module(folder: Path, reward: RewardArguments) -> str:
    """Write a module into ``folder`` whose function gives the rewards of ``reward``; return its import path.

    Args:
        folder: A folder on the import path of the run's processes.
        reward: The section of the run. A key in it is in the file too, so that only this user may read that.
    """
    set_here = changed(reward, [field.name for field in dataclasses.fields(reward)])
    values = {name: getattr(reward, name) for name in set_here}
    text = '"""Written by miles smoke."""\nfrom miles.commands.smoke_parts.reward import with_spread\n\n'
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{MODULE}.py"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as opened:
        opened.write(f"{text}reward = with_spread({values!r})\n")
    return f"{MODULE}:reward"


def with_spread(values: Mapping[str, Any]) -> Callable[[Sequence[Sample]], Any]:
    """Return the reward function of a section, whose rewards differ within a call of two or more samples.

    Args:
        values: The fields of ``RewardArguments`` that are not their defaults.
    """
    given = RewardArguments(**values)
    key = given.reward_key if given.rm_type is None else None
    function: Callable[[Sequence[Sample]], Any]
    if given.rm_type is None:
        assert given.custom_rm_path is not None, "written for a section with a reward"
        function = import_function(given.custom_rm_path, "--custom-rm-path")
    else:
        function = get_reward_function(given)

    def reward(samples: Sequence[Sample]) -> Any:
        results = function(samples)
        return _awaited(results, key) if inspect.isawaitable(results) else _spread(results, key)

    return reward


async def _awaited(results: Awaitable[Any], key: str | None) -> Any:
    return _spread(await results, key)


def _spread(results: Any, key: str | None) -> Any:
    """Return the numbers, changed if they are all the same; what are no numbers stays, for the caller to report."""
    values = results if key is None else [result[key] for result in results]
    if not isinstance(values, list | tuple) or not all(isinstance(value, Real) for value in values):
        return values
    if len(values) > 1 and len(set(values)) == 1:
        return [value + number % 2 for number, value in enumerate(values)]
    return values
