"""The reward of the example: the share of the answer that is the letter asked for."""

from __future__ import annotations

from collections.abc import Sequence

from miles.sample import Sample


def share_of_letter(samples: Sequence[Sample]) -> list[float]:
    """From 0 to 1, one number a sample; 0 for an empty answer."""
    return [s.response.count(str(s.prompt.label)) / max(len(s.response), 1) for s in samples]
