"""Reward an answer by the share of it that is the requested letter."""

from __future__ import annotations

from collections.abc import Sequence

from miles.types.sample import Sample


def share_of_letter(samples: Sequence[Sample]) -> list[float]:
    """Return one number from 0 to 1 per sample; 0 for an empty answer."""
    return [s.response.count(str(s.prompt.label)) / max(len(s.response), 1) for s in samples]
