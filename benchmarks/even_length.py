"""The reward of vs_trl.py for random weights: 1 for an answer of even length, so that samples of a prompt differ."""

from collections.abc import Sequence
from typing import Any


def even_length(samples: Sequence[Any], **_: Any) -> list[float]:
    """Return a reward for each sample."""
    return [1.0 - len(sample.response) % 2 for sample in samples]
