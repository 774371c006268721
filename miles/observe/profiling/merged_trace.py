"""One trace of several processes, in the format that Perfetto and chrome://tracing open.

Every process is a row of its own with its threads below it; ``idle`` is a thread that shows when no other one works.
Perfetto leaves out an event that ends after the one around it, in whole nanoseconds, and PyTorch records some that do.
The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from miles.base.process_trace import Event, ProcessTrace, idle_times, threads_of

WAITS = "waits of coroutines"
IDLE = "idle"


def write_trace(path: Path, processes: Sequence[ProcessTrace]) -> None:
    """Write the processes, whose clocks are the same, as one compressed file."""
    begin = min(map(_first_time, processes))
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=5) as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for number, event in enumerate(_events(processes, begin)):
            file.write(("" if number == 0 else ",\n") + json.dumps(event, separators=(",", ":")))
        file.write("\n]}\n")


def _events(processes: Sequence[ProcessTrace], begin: int) -> Iterator[dict[str, Any]]:
    for number, process in enumerate(processes, start=1):
        yield _named("process_name", number, 0, process.name)
        yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
        rows = [IDLE, *threads_of(process)]
        for row, name in enumerate(rows, start=1):
            yield _named("thread_name", number, row, name)
            yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": row, "args": {"sort_index": row}}
        for start, end in idle_times(process):
            yield _slice(IDLE, IDLE, number, 1, start - begin, end - start)
        row_of = {name: row for row, name in enumerate(rows, start=1)}
        for event in _nested(process.events):
            yield _slice(event.name, event.category, number, row_of[event.thread], event.start - begin, event.duration)
        for wait, (name, start, end) in enumerate(process.waits):
            one: dict[str, Any] = {"cat": WAITS, "name": name, "pid": number, "tid": 0, "id": f"{number}.{wait}"}
            yield one | {"ph": "b", "ts": _microseconds(start - begin)}
            yield one | {"ph": "e", "ts": _microseconds(end - begin)}


def _first_time(process: ProcessTrace) -> int:
    """Return when the first event of a process began, or its recording."""
    events, waits = (event.start for event in process.events), (start for _, start, _ in process.waits)
    return min([process.start, *events, *waits])


def _nested(events: Iterable[Event]) -> Iterator[Event]:
    """Yield ``events``, sorted as those of ``ProcessTrace``; one that ends after the event around it is shortened."""
    thread, ends = "", [0]
    for event in events:
        if event.thread != thread:
            thread, ends = event.thread, []
        while ends and ends[-1] <= event.start:
            ends.pop()
        ends.append(min([event.end, *ends[-1:]]))
        yield event._replace(duration=ends[-1] - event.start)


def _microseconds(nanoseconds: int) -> float:
    """Return the time in the unit of the format; a reader that cuts off fractions gets the same nanoseconds back."""
    found = nanoseconds / 1000
    return found if int(found * 1000) == nanoseconds else math.nextafter(found, math.inf)


def _slice(name: str, category: str, process: int, row: int, start: int, duration: int) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(duration)}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": row, **times}


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}
