"""The phases of the main loop as a process of the trace."""

from __future__ import annotations

import time
from collections.abc import Callable

from miles.profiling.process_trace import SPAN, Event, ProcessTrace


class LoopPhases:
    """Notes which phase the main loop is in. A phase within another one is shown in its place."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._began = 0
        self._current: tuple[str, int] | None = None
        self._events: list[Event] = []

    def begin(self) -> None:
        """Begin an iteration."""
        self._began, self._current, self._events = self._clock(), None, []

    def phase(self, name: str | None) -> None:
        """Note the phase that begins, or goes on after one within it; None if the last has ended."""
        now = self._clock()
        if self._current is not None:
            ended, start = self._current
            self._events.append(Event(ended, SPAN, "main", start, now - start))
        self._current = None if name is None else (name, now)

    def end(self, clock_name: str) -> ProcessTrace:
        """Return the iteration."""
        self.phase(None)
        return ProcessTrace("main loop", self._began, self._clock(), self._events, clock=clock_name)
