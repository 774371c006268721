"""The table of rewards is complete."""

from miles.tasks.rewards.built_in import REWARDS
from scripts.pages.rewards import rewards_table


def test_the_table_has_every_reward():
    assert all(f"| `{name}` |" in rewards_table() for name in REWARDS)
