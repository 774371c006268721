"""Name parts of the work, so that they appear in the trace of ``--profile``.

A span costs one comparison while nothing is recorded.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from miles.base.attributes import set_within

MOST_WAITS = 20_000  # kept per recording; later ones are only counted
MOST_SPANS = 200_000  # the same for spans, which PyTorch records if it is imported

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass
class Recording:
    """The part of a process's record that PyTorch does not keep.

    Attributes:
        waits: Name, begin and end of each wait, in nanoseconds since 1970.
        spans: Name, thread, begin and end of each span; None if PyTorch records them.
        dropped: How many waits and spans were not kept.
    """

    waits: list[tuple[str, int, int]] = field(default_factory=list)
    spans: list[tuple[str, int, int, int]] | None = None
    dropped: int = 0


_recording: Recording | None = None


def span(name: str) -> AbstractContextManager[Any]:
    """Name the work of this thread until the block ends. Blocks nest."""
    if _recording is None:
        return _NOTHING
    if _recording.spans is not None:
        return _recorded_here(name, _recording, _recording.spans)
    from torch.profiler import record_function  # not at the top: torch takes seconds

    return record_function(name)


@contextmanager
def _recorded_here(name: str, recording: Recording, spans: list[tuple[str, int, int, int]]) -> Iterator[None]:
    began = time.time_ns()
    try:
        yield
    finally:
        if len(spans) < MOST_SPANS:
            spans.append((name, threading.get_native_id(), began, time.time_ns()))
        else:
            recording.dropped += 1


@contextmanager
def waiting(name: str) -> Iterator[None]:
    """Name the thing that a coroutine waits for until the block ends. Many of them overlap in one thread."""
    recording = _recording
    if recording is None:
        yield
        return
    began = time.time_ns()
    try:
        yield
    finally:
        if len(recording.waits) < MOST_WAITS:
            recording.waits.append((name, began, time.time_ns()))
        else:
            recording.dropped += 1


class SpanTimers:
    """Replaces Megatron's ``Timers`` while a profile is recorded: its timers are spans.

    Megatron's ``pipeline_parallel/schedules.py`` and ``p2p_communication.py`` name forward, backward and the exchange
    between stages by ``config.timers(name, log_level=2).start()`` and ``config.timers(name).stop()``.
    """

    def __init__(self) -> None:
        self._open: dict[str, list[AbstractContextManager[Any]]] = {}
        self._name = ""

    def __call__(self, name: str, log_level: int = 0) -> SpanTimers:
        """Choose the timer that the next ``start`` or ``stop`` is about."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Begin a span. There is no barrier, which would change the measured times."""
        began = span(self._name)
        began.__enter__()
        self._open.setdefault(self._name, []).append(began)

    def stop(self, barrier: bool = False) -> None:
        """End the span that began last under this name."""
        self._open[self._name].pop().__exit__(None, None, None)


def named_by_timers(config: Any) -> AbstractContextManager[None]:
    """Have Megatron name its work within the block, if a profile is recorded; ``config`` is the model's."""
    return nullcontext() if _recording is None else set_within(config, timers=SpanTimers())


# The record of one process, in a form that can be sent: names, threads and nanoseconds since 1970.


MOST_EVENTS = 300_000  # of one process and iteration; about 4 MB of the compressed trace

OPERATION = "cpu_op"  # the categories of PyTorch's traces that are kept
SPAN = "user_annotation"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_CATEGORIES = (OPERATION, SPAN, *KERNELS)


class Event(NamedTuple):
    """A piece of work. ``category`` is PyTorch's; ``thread`` is shown as the name of its row."""

    name: str
    category: str
    thread: str
    start: int
    duration: int

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.duration


@dataclass(frozen=True)
class ProcessTrace:
    """One process during one iteration.

    Attributes:
        name: The name of the process in the trace.
        start: When recording began.
        end: When it ended.
        events: Work, sorted by thread, then by start; an event comes before those within it.
        waits: Name, begin and end of each wait of a coroutine.
        dropped: The number of events and waits that are left out, because there were too many.
        clock: The name of the clock that the process reads; processes on one machine have the same.
    """

    name: str
    start: int
    end: int
    events: list[Event] = field(default_factory=list)
    waits: list[tuple[str, int, int]] = field(default_factory=list)
    dropped: int = 0
    clock: str = ""

    def within(self, other: ProcessTrace) -> ProcessTrace:
        """Return the same trace with the beginning and the end of another, between which idle time counts."""
        return replace(self, start=other.start, end=other.end)

    def shifted(self, nanoseconds: int) -> ProcessTrace:
        """Return the same trace by a clock that is ahead by ``nanoseconds``."""
        return replace(
            self,
            start=self.start + nanoseconds,
            end=self.end + nanoseconds,
            events=[event._replace(start=event.start + nanoseconds) for event in self.events],
            waits=[(name, began + nanoseconds, ended + nanoseconds) for name, began, ended in self.waits],
        )


def from_kineto(trace: Mapping[str, Any], most: int = MOST_EVENTS) -> tuple[list[Event], int]:
    """Return the events of a trace that ``torch.profiler`` has written, and how many were left out.

    Times in the file are microseconds after ``baseTimeNanoseconds`` (Kineto, ``libkineto/src/output_json.cpp``). Above
    ``most`` events the shortest operations are left out; spans stay.
    """
    base = int(trace.get("baseTimeNanoseconds", 0))
    events = []
    for event in trace["traceEvents"]:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in _CATEGORIES:
            continue
        thread = f"GPU {event['pid']} stream {event['tid']}" if category in KERNELS else f"thread {event['tid']}"
        start = base + round(event["ts"] * 1000)
        events.append(Event(event["name"], category, thread, start, round(event.get("dur", 0) * 1000)))
    longest = _longest(events, most)
    return sorted(longest, key=lambda event: (event.thread, event.start, -event.duration)), len(events) - len(longest)


def _longest(events: list[Event], most: int) -> list[Event]:
    if len(events) <= most:
        return events
    spans = [event for event in events if event.category == SPAN]
    others = sorted((event for event in events if event.category != SPAN), key=lambda event: -event.duration)
    return [*spans, *others[: max(0, most - len(spans))]]


def self_times(events: Iterable[Event]) -> Iterable[tuple[Event, int]]:
    """Yield each event with the nanoseconds that no event within it takes.

    Args:
        events: Sorted as in ``ProcessTrace``.

    >>> outer, inner = Event("a", SPAN, "t", 0, 10), Event("b", OPERATION, "t", 2, 3)
    >>> [(event.name, own) for event, own in self_times([outer, inner])]
    [('b', 3), ('a', 7)]
    """
    open_events: list[tuple[Event, int]] = []  # with the time within that is taken
    for event in events:
        while open_events and (open_events[-1][0].thread != event.thread or open_events[-1][0].end <= event.start):
            ended, taken = open_events.pop()
            yield ended, max(0, ended.duration - taken)
        if open_events:
            outer, taken = open_events[-1]
            open_events[-1] = outer, taken + min(event.end, outer.end) - event.start
        open_events.append((event, 0))
    while open_events:
        ended, taken = open_events.pop()
        yield ended, max(0, ended.duration - taken)


def idle_times(trace: ProcessTrace, shortest: int = 100_000) -> list[tuple[int, int]]:
    """Return the begin and end of the times when no thread of the process works on anything that has a name.

    Args:
        trace: The process.
        shortest: Nanoseconds of the shortest gap that counts.
    """
    during = (event for event in trace.events if event.start < trace.end and event.end > trace.start)
    busy = sorted((max(event.start, trace.start), min(event.end, trace.end)) for event in during)
    gaps = []
    at = trace.start
    for start, end in (*busy, (trace.end, trace.end)):
        if start - at >= shortest:
            gaps.append((at, start))
        at = max(at, end)
    return gaps


def threads_of(trace: ProcessTrace) -> list[str]:
    """Return the rows of a process, those with most events first."""
    return [name for name, _ in Counter(event.thread for event in trace.events).most_common()]


# Record one process with ``torch.profiler``, and the phases of the main loop, which is shown as a process too.


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
        self._recording: Recording | None = None
        self._began = 0

    def start(self) -> None:
        """Begin to record; spans and waits that are open already are left out. Does nothing if it records already."""
        global _recording
        if self._recording is not None:
            return
        if self._operations:
            import torch
            from torch._C._profiler import _ExperimentalConfig

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            # The embedded engine and conversion work in threads of their own.
            every_thread = _ExperimentalConfig(profile_all_threads=True)
            self._profiler = torch.profiler.profile(activities=activities, experimental_config=every_thread)
            self._profiler.start()
        _recording = self._recording = Recording(spans=None if self._operations else [])
        self._began = time.time_ns()

    def stop(self) -> ProcessTrace | None:
        """Return what was recorded; None if ``start`` was not called, as in a process that replaced another."""
        global _recording
        if self._recording is None:
            return None
        ended = time.time_ns()
        recording = self._recording
        self._recording = _recording = None
        if recording.spans is not None:
            spans = recording.spans
            events = [Event(name, SPAN, f"thread {thread}", start, end - start) for name, thread, start, end in spans]
            events.sort(key=lambda event: (event.thread, event.start, -event.duration))
            dropped = recording.dropped
            return ProcessTrace(self._name, self._began, ended, events, recording.waits, dropped, clock_name())
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
        self._began = self._clock()
        self._current = None
        self._events = []

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
