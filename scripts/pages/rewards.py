"""Make the table of rewards of the built docs; ``python -m scripts.pages.rewards`` prints it."""

from __future__ import annotations

import dataclasses

from miles.base.flags import flag_name
from miles.tasks.rewards.built_in import REWARDS
from miles.tasks.rewards.settings import RewardArguments

ALWAYS = "linear"  # of a reward without a limit: the time of an answer is linear in its length


def rewards_table() -> str:
    """Return a markdown table of the built-in rewards: their value, the data they need, flags and time limit."""
    lines = ["| name | reward | data it needs | flags | time limit |", "|---|---|---|---|---|"]
    for name, reward in REWARDS.items():
        cells = (
            f"`{name}`",
            reward.summary.replace("<", "&lt;"),
            reward.data or "none",
            ", ".join(_flag(flag) for flag in reward.reads),
            reward.limit or ALWAYS,
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _flag(name: str) -> str:
    default = {field.name: field.default for field in dataclasses.fields(RewardArguments)}[name]
    return f"`{flag_name(name)}`" if default is None or default is False else f"`{flag_name(name)} {default}`"


if __name__ == "__main__":
    print(rewards_table(), end="")
