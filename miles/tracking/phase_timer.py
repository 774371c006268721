"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseTimer:
    """Adds up the seconds of named phases until they are read.

    >>> timer = PhaseTimer()
    >>> with timer.phase("generate"):
    ...     timer.add("sync_weights", 0.25)  # measured elsewhere, in another process say
    >>> sorted(timer.metrics())
    ['time/generate', 'time/step', 'time/sync_weights']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time until the block ends, even by an error, to ``name``. A nested phase counts in both."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add time measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def metrics(self) -> dict[str, float]:
        """``time/<phase>`` in seconds, and reset them.

        ``time/step`` is the wall time since the last reading, phases or not, unless a phase named ``step`` was timed.
        """
        now = time.perf_counter()
        seconds = {"step": now - self._started, **self._seconds}
        self._seconds, self._started = {}, now
        return {f"time/{name}": value for name, value in seconds.items()}
