"""What generates the samples of a group: the engine alone, a limit of the reasoning, or a function of the user's."""

from __future__ import annotations

from functools import partial

from miles.arguments.rollout import RolloutArguments
from miles.import_path import load_function
from miles.rollout.groups import GroupGenerator, generate_group
from miles.rollout.thinking_limit import ThinkingLimit
from miles.rollout.trajectory import generate_trajectories

_FLAG = "--custom-generate-function-path"


def get_group_generator(rollout: RolloutArguments) -> GroupGenerator:
    """Return what the flags choose. Agent programs and environments are in ``agents/``.

    Raises:
        ValueError: The path of ``--custom-generate-function-path`` cannot be imported.
    """
    path = rollout.custom_generate_function_path
    if path is not None:
        return partial(generate_trajectories, load_function(path, _FLAG), f"{_FLAG} {path}")
    if rollout.thinking_max_len is not None:
        limit = ThinkingLimit.from_flags(rollout)
        return partial(generate_trajectories, limit, f"--thinking-max-len {limit.max_len}")
    return generate_group
