"""``--rm-type exact_match``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.rewards.base import Reward, Rewards
from miles.rewards.reference import reference_text
from miles.sample import Sample


class ExactMatch(Reward):
    """1 if response and label are the same text (white space around both aside), else 0."""

    name = "exact_match"
    summary = "1 if the response is the label"
    data = "label: text or a number"

    def score(self, samples: Sequence[Sample], flags: Any) -> Rewards:
        """Compare texts."""
        return [float(s.response.strip() == reference_text(s.prompt, self.name)) for s in samples]


REWARD = ExactMatch()
