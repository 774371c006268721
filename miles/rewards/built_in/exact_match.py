"""``--rm-type exact_match``."""

from __future__ import annotations

from collections.abc import Sequence

from miles.rewards.reference import reference_text
from miles.sample import Sample


def exact_match(samples: Sequence[Sample]) -> list[float]:
    """Score 1 if response and label are the same text (white space around both aside), else 0.

    Raises ``ValueError`` for a label that is missing or neither text nor number.
    """
    return [float(s.response.strip() == reference_text(s.prompt, "exact_match")) for s in samples]
