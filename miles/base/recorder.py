"""Record one process with ``torch.profiler``, and the phases of the main loop, which is shown as a process too."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles.base import profiling
from miles.base.profiling import SPAN, Event, ProcessTrace, from_kineto

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def clock_name() -> str:
    """Return a name of the clock that this process reads: the same in all processes of a machine."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def read_clock() -> tuple[str, int]:
    """Return the name of this process's clock, and its nanoseconds since 1970."""
    return clock_name(), time.time_ns()


class Recorder:
    """Record the operations, kernels and spans of all threads of this process between ``start`` and ``stop``.

    With ``operations`` False it records spans and waits only, and imports no torch.
    """

    def __init__(self, name: str, operations: bool = True) -> None:
        self._name = name
        self._operations = operations
        self._profiler: Any = None
        self._recording: profiling.Recording | None = None
        self._began = 0

    def start(self) -> None:
        """Begin to record. Does nothing if it records already."""
        if self._recording is not None:
            return
        if not self._operations:
            self._recording = profiling.begin(by_torch=False)
            self._began = time.time_ns()
            return
        import torch
        from torch._C._profiler import _ExperimentalConfig

        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # The embedded engine and conversion work in threads of their own.
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(activities=activities, experimental_config=every_thread)
        self._profiler.start()
        self._recording = profiling.begin()
        self._began = time.time_ns()

    def stop(self) -> ProcessTrace | None:
        """Return what was recorded; None if ``start`` was not called, as in a process that replaced another."""
        if self._recording is None:
            return None
        ended = time.time_ns()
        profiling.end()
        recording, self._recording = self._recording, None
        if recording.spans is not None:
            made = [Event(name, SPAN, f"thread {t}", start, end - start) for name, t, start, end in recording.spans]
            made.sort(key=lambda event: (event.thread, event.start, -event.duration))
            return ProcessTrace(self._name, self._began, ended, made, recording.waits, recording.dropped, clock_name())
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            written = json.loads(path.read_bytes())
        self._profiler = None
        events, dropped = from_kineto(written)
        dropped += recording.dropped
        return ProcessTrace(self._name, self._began, ended, events, recording.waits, dropped, clock_name())


def clock_offset(readings: Sequence[tuple[int, int, int]]) -> int:
    """Return by how many nanoseconds another machine's clock is ahead of this one's.

    As in NTP (RFC 5905, section 8), the reading with the shortest round trip counts; its error is at most half of that.

    Args:
        readings: This clock before, the other clock, and this clock after, of each reading.

    >>> clock_offset([(0, 1_500, 2_000), (3_000, 4_050, 3_100)])
    1000
    """
    before, other, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return other - (before + after) // 2


class LoopPhases:
    """Notes which phase the main loop is in. A phase within another one is shown instead of it."""

    def __init__(self, clock: Callable[[], int] = time.time_ns) -> None:
        self._clock = clock
        self._began = 0
        self._current: tuple[str, int] | None = None
        self._events: list[Event] = []

    def begin(self) -> None:
        """Begin an iteration."""
        self._began, self._current, self._events = self._clock(), None, []

    def phase(self, name: str | None) -> None:
        """Note the phase that begins, or continues after one within it; None if the last has ended."""
        now = self._clock()
        if self._current is not None:
            ended, start = self._current
            self._events.append(Event(ended, SPAN, "main", start, now - start))
        self._current = None if name is None else (name, now)

    def end(self, clock_name: str) -> ProcessTrace:
        """Return the iteration."""
        self.phase(None)
        return ProcessTrace("main loop", self._began, self._clock(), self._events, clock=clock_name)
