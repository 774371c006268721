"""``--rm-type length``."""

from __future__ import annotations

from collections.abc import Sequence

from miles.sample import Sample


def length(samples: Sequence[Sample]) -> list[float]:
    """Minus the number of response tokens: the shorter, the better. Needs no label.

    A reward that any model can raise within a few steps, so a check of a new set-up rather than a goal.
    """
    return [-float(len(s.response_ids)) for s in samples]
