"""The protocol of reward functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles.sample import Sample


class RewardFunction(Protocol):
    """Scores a batch of generated samples: one number per sample, in order. May await a server or a subprocess."""

    async def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return one finite number per sample, in order."""
        ...
