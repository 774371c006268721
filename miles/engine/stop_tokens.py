"""Where a model's responses end, as its configuration says it."""

from __future__ import annotations

from collections.abc import Iterable


def eos_token_ids(configured: int | Iterable[int] | None) -> frozenset[int]:
    """The ids of an ``eos_token_id``, which configurations have as one number, as several, or not at all."""
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)
