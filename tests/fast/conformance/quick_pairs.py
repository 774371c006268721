"""Pairs of test parameters, few of them in the fast suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def quick_pairs(firsts: Sequence[Any], seconds: Sequence[Any], quick_seconds: int | None = None) -> list[Any]:
    """Return every pair as parameters. Each of ``firsts`` and of ``seconds`` is in a quick pair; others are slow tests.

    If ``quick_seconds`` is given, quick pairs have the first so many of ``seconds`` only.
    """
    firsts, seconds = list(firsts), list(seconds)
    usable = seconds[:quick_seconds]
    turns = range(max(len(firsts), len(usable)))
    quick = {(turn % len(firsts), turn % len(usable)) for turn in turns}
    return [
        pytest.param(first, second, marks=[] if (i, j) in quick else pytest.mark.slow)
        for i, first in enumerate(firsts)
        for j, second in enumerate(seconds)
    ]
