"""The generator of the samples of a group: the engine alone, a limit of the reasoning, or a function of the user's.

Or an agent program or an environment, whose calls are recorded (``agents/``).
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from miles.base.user_code import load_function
from miles.config.rollout import RolloutArguments
from miles.config.settings import Settings
from miles.rollout.groups import GroupGenerator, generate_group, response_seed
from miles.rollout.trajectory import Trajectory, generate_trajectories

if TYPE_CHECKING:
    from miles.rollout.agents.generator import SessionGenerator


_FLAG = "--custom-generate-function-path"


def get_group_generator(rollout: RolloutArguments) -> GroupGenerator:
    """Return the generator that the flags choose, except for agent programs and environments.

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


def session_generator(settings: Settings) -> SessionGenerator | None:
    """Return the generator of trajectories by recorded calls: programs or environments; None for neither.

    Raises:
        ValueError: The program or the environment is not there.
    """
    # Imported here: both bring a web server, which takes long to import.
    if settings.rollout.agent_command is not None:
        from miles.rollout.agents.generator import AgentGenerator

        return AgentGenerator(settings)
    if settings.rollout.environment is not None:
        from miles.rollout.agents.environments import EnvironmentGenerator

        return EnvironmentGenerator(settings)
    return None


@asynccontextmanager
async def group_generator(settings: Settings) -> AsyncIterator[GroupGenerator]:
    """Give a block the generator of groups: programs, environments, a user's function, or the engine alone.

    Raises:
        ValueError: The program, the environment or the function is not there.
    """
    generator = session_generator(settings)
    if generator is None:
        yield get_group_generator(settings.rollout)
        return
    try:
        yield generator
    finally:
        await generator.close()


# ``--thinking-max-len N``: end the reasoning of an answer that is still thinking after N tokens.


@dataclass(frozen=True)
class ThinkingLimit:
    """Generates a response in one piece, or interrupts its reasoning and lets the model answer.

    This is the forced interruption of ScaleRL (arXiv 2510.13786): if the first ``n`` tokens do not hold ``end``,
    ``interruption`` is appended, with loss mask 0, and the model continues from there. ``n`` is drawn for each response
    from ``min_len`` to ``max_len``, by its seed.
    """

    min_len: int  # tokens
    max_len: int
    end: str
    interruption: str

    @classmethod
    def from_flags(cls, rollout: RolloutArguments) -> ThinkingLimit:
        """Return the limit of the flags ``--thinking-…``."""
        longest = rollout.thinking_max_len
        assert longest is not None
        shortest = longest if rollout.thinking_min_len is None else rollout.thinking_min_len
        return cls(shortest, longest, rollout.thinking_end, rollout.thinking_interruption)

    async def __call__(self, trajectory: Trajectory) -> None:
        """Take the trajectory to its end. Raises the engine's errors."""
        draw = random.Random(response_seed(trajectory.seed_of_turn(0), "thinking"))
        thoughts = await trajectory.generate(max_new_tokens=draw.randint(self.min_len, self.max_len))
        if thoughts.finish_reason != "length" or trajectory.finished:
            return
        # The end may be a special token, which the text of a turn leaves out.
        if self.end not in trajectory.tokenizer.decode(thoughts.token_ids, skip_special_tokens=False):
            trajectory.append(self.interruption)
        if not trajectory.finished:
            await trajectory.generate()
