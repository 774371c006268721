"""What a reward function is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles.sample import Sample


class RewardFunction(Protocol):
    """Scores a batch of generated samples: one number a sample, in order. It may await (a server, a subprocess)."""

    async def __call__(self, samples: Sequence[Sample]) -> list[float]: ...
