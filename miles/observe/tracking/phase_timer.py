"""Seconds per phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from miles.types.metrics import Metric


class PhaseTimer:
    """Adds up the seconds of named phases until they are read.

    >>> timer = PhaseTimer()
    >>> with timer.phase("generate"):
    ...     timer.add("sync_weights", 0.25)  # measured elsewhere, in another process say
    >>> sorted(timer.metrics())
    ['time/generate', 'time/step', 'time/sync_weights']
    """

    def __init__(self, on_phase: Callable[[str | None], None] = lambda name: None) -> None:
        """Begin.

        Args:
            on_phase: Called with the name of each phase when it begins, and when a phase within it has ended; with
                None when the outermost has ended.
        """
        self._on_phase = on_phase
        self._running: list[str] = []
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time until the block ends, even by an error, to ``name``. A nested phase counts in both."""
        start = time.perf_counter()
        self._running.append(name)
        self._on_phase(name)
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)
            self._running.pop()
            self._on_phase(self._running[-1] if self._running else None)

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

    def add_to(self, row: dict[str, Metric], generated_during: str) -> None:
        """Add ``metrics()`` to a row, and the tokens per second of the phase that generated them."""
        row |= {name: Metric(seconds) for name, seconds in self.metrics().items()}
        if "rollout/tokens" in row:
            row["perf/tokens_per_second"] = Metric(row["rollout/tokens"].value, row[f"time/{generated_during}"].value)
