"""Whether a response passes, which is what pass@k and ``--max-prompt-pass-rate`` count."""

from __future__ import annotations

from collections.abc import Iterable

from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.settings import CUSTOM
from miles.types.sample import PromptGroup, Sample

PASS_REWARD = 1.0  # a sample passes with this reward or more


def deciding_part(names: Iterable[str]) -> str | None:
    """Return the part of a sum of rewards that decides whether a sample passes; None if no part can.

    It is the first built-in one that reads the prompt's row, such as its label, else the user's own. The others, such
    as ``format`` and ``length``, say nothing of whether an answer is right.

    >>> deciding_part(["repetition", "custom", "math", "f1"]), deciding_part(["format", "length"])
    ('math', None)
    """
    names = list(names)
    reading = (name for name in names if name in REWARDS and REWARDS[name].reads_row)
    return next(reading, CUSTOM if CUSTOM in names else None)


def deciding_reward(sample: Sample) -> float:
    """Return the number that decides whether a scored sample passes: its reward, or the ``deciding_part`` of a sum.

    If no part of a sum decides, the sum itself does, as in a run with a single reward.
    """
    assert sample.reward is not None, "the sample has been scored"
    part = deciding_part(sample.reward_parts)
    return sample.reward if part is None else sample.reward_parts[part]


def passes(sample: Sample) -> bool:
    """Return whether a scored sample passes: its ``deciding_reward`` is 1 or more."""
    return deciding_reward(sample) >= PASS_REWARD


def passes_of(group: PromptGroup) -> list[bool]:
    """Return whether each sample of a group passes; trajectories dropped by ``--reward-error drop`` do not."""
    return [*map(passes, group.samples), *[False] * group.dropped_trajectories]
