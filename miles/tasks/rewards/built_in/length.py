"""``--rm-type length``."""

from collections.abc import Sequence

from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Sample


class Length(Reward[None]):
    """Minus the number of response tokens: the shorter, the better.

    A reward that any model can raise within a few steps, so a check of a new set-up rather than a goal.
    """

    name = "length"
    summary = "minus the number of response tokens"
    needs_label = False

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Count the tokens."""
        return [-float(len(s.response_ids)) for s in samples]
