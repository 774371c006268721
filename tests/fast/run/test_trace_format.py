"""The merged trace obeys the Trace Event Format, and Perfetto keeps every slice: the slices of a row nest."""

from __future__ import annotations

import gzip
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.base import strict_json
from miles.base.profiling import OPERATION, SPAN, Event, ProcessTrace, Recorder, span, waiting
from miles.run.iteration_profiler import IDLE, _microseconds, write_trace

EPOCH = 1_700_000_000_000_000_000  # nanoseconds
TIMES = st.integers(0, 10**9)


@st.composite
def processes(draw: Any) -> ProcessTrace:
    """Return a process whose operations overlap as PyTorch records them: some end after the one around them."""
    rows = st.tuples(st.sampled_from(["thread 1", "thread 2"]), TIMES, st.integers(0, 10**6) | TIMES)
    events = [
        Event(f"op {number}", draw(st.sampled_from([OPERATION, SPAN])), thread, EPOCH + start, duration)
        for number, (thread, start, duration) in enumerate(draw(st.lists(rows, max_size=30)))
    ]
    waits = [
        ("wait", EPOCH + start, EPOCH + start + length) for start, length in draw(st.lists(st.tuples(TIMES, TIMES)))
    ]
    start = EPOCH + draw(TIMES)
    in_order = sorted(events, key=lambda event: (event.thread, event.start, -event.duration))
    return ProcessTrace(draw(st.text()), start, start + draw(TIMES), in_order, waits)


def written(traces: list[ProcessTrace], path: Path) -> list[dict[str, Any]]:
    """Write a trace and return its events; JSON outside the standard, such as NaN, is an error."""
    write_trace(path, traces)
    document = strict_json.loads(gzip.decompress(path.read_bytes()).decode())
    assert isinstance(document, dict) and document["displayTimeUnit"] == "ms"
    return document["traceEvents"]


def check(events: list[dict[str, Any]], number_of_processes: int) -> None:
    """Check the rules of the format, with times as Perfetto reads them: microseconds cut off to nanoseconds."""
    names, rows, open_waits = {}, defaultdict(list), Counter()
    for event in events:
        assert event["ph"] in {"M", "X", "b", "e"} and isinstance(event["name"], str), event
        assert type(event["pid"]) is int and type(event["tid"]) is int, event
        if event["ph"] == "M":
            key = (event["name"], event["pid"], event["tid"])
            assert key not in names, "a row has one name"
            names[key] = event["args"]
            continue
        assert event["ts"] >= 0 and event["cat"], event
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((int(event["ts"] * 1000), int(event["dur"] * 1000)))
        else:
            wait = (event["pid"], event["cat"], event["id"], event["name"])
            open_waits[wait] += 1 if event["ph"] == "b" else -1
            assert open_waits[wait] in (0, 1), "a wait ends once, after it began"
    assert not any(open_waits.values())
    named = {pid for name, pid, _ in names if name == "process_name"}
    assert named == {*range(1, number_of_processes + 1)}
    assert {pid for name, pid, _ in names if name == "process_sort_index"} == named
    for (pid, tid), slices in rows.items():
        assert ("thread_name", pid, tid) in names and ("thread_sort_index", pid, tid) in names
        assert [start for start, _ in slices] == sorted(start for start, _ in slices)
        ends: list[int] = []
        for start, duration in slices:
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + duration <= ends[-1], f"process {pid}, row {tid}: {start} ns ends too late"
            ends.append(start + duration)


@given(st.lists(processes(), min_size=1, max_size=3))
def test_every_trace_obeys_the_format(tmp_path_factory, traces):
    events = written(traces, tmp_path_factory.mktemp("trace") / "trace.json.gz")
    check(events, len(traces))
    slices = [event for event in events if event["ph"] == "X" and event["name"] != IDLE]
    assert len(slices) == sum(len(trace.events) for trace in traces)
    assert sum(event["ph"] == "b" for event in events) == sum(len(trace.waits) for trace in traces)


def test_a_recorded_trace_obeys_the_format(tmp_path):
    recorder = Recorder("a process")
    recorder.start()
    weight = torch.ones(8, 8, requires_grad=True)
    for number in range(20):
        with span(f"micro-batch {number}"), waiting("an answer"):
            (weight @ weight).relu().sum().backward()
    trace = recorder.stop()
    assert trace is not None and len(trace.events) > 100
    check(written([trace, trace], tmp_path / "trace.json.gz"), 2)


@given(st.integers(0, 2**50))
def test_times_are_exact_to_the_nanosecond(nanoseconds):
    assert int(_microseconds(nanoseconds) * 1000) == nanoseconds
