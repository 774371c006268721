"""docs/rewards.md has the table of the rewards there are."""

from pathlib import Path

from miles.arguments.pages.rewards import rewards_table
from miles.rewards.built_in import REWARDS

PAGE = Path(__file__).parents[4] / "docs" / "rewards.md"


def test_the_table_is_up_to_date():
    assert rewards_table() in PAGE.read_text(encoding="utf-8"), "run python -m miles.arguments.pages.rewards"
    assert all(f"| `{name}` |" in rewards_table() for name in REWARDS)
