"""Record iterations of a run in all of its processes (``--profile``), and write a trace and a table of each."""

import gzip
import json
import math
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from miles.base.disk_faults import disk_fault
from miles.base.profiling import (
    KERNELS,
    SPAN,
    Event,
    LoopPhases,
    ProcessTrace,
    clock_name,
    clock_offset,
    idle_times,
    self_times,
    threads_of,
)
from miles.config.profiling import FOLDER, ProfilingArguments
from miles.run.liveness import Workers
from miles.run.rollout_actor import RolloutDriver
from miles.run.train_actor import TrainDriver

# One trace of several processes, in the format that Perfetto and chrome://tracing open.
#
# Every process is a separate row with its threads below it; ``idle`` is a thread that shows when no other one works.
# Perfetto leaves out an event that ends after the one around it, in whole nanoseconds, and PyTorch records some that
# do. The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).


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
            pair: dict[str, Any] = {"cat": WAITS, "name": name, "pid": number, "tid": 0, "id": f"{number}.{wait}"}
            yield pair | {"ph": "b", "ts": _microseconds(start - begin)}
            yield pair | {"ph": "e", "ts": _microseconds(end - begin)}


def _first_time(process: ProcessTrace) -> int:
    """Return when the first event of a process began, or its recording."""
    events = [event.start for event in process.events]
    waits = [start for _, start, _ in process.waits]
    return min([process.start, *events, *waits])


def _nested(events: Iterable[Event]) -> Iterator[Event]:
    """Yield ``events``, sorted as in ``ProcessTrace``; one that ends after the event around it is shortened."""
    thread = ""
    ends: list[int] = []  # of the events around this one, the innermost last
    for event in events:
        if event.thread != thread:
            thread, ends = event.thread, []
        while ends and ends[-1] <= event.start:
            ends.pop()
        ends.append(min([event.end, *ends[-1:]]))
        yield event._replace(duration=ends[-1] - event.start)


def _microseconds(nanoseconds: int) -> float:
    """Return the time in the unit of the format; a reader that cuts off fractions gets the same nanoseconds back."""
    microseconds = nanoseconds / 1000
    return microseconds if int(microseconds * 1000) == nanoseconds else math.nextafter(microseconds, math.inf)


def _slice(name: str, category: str, process: int, row: int, start: int, duration: int) -> dict[str, Any]:
    times = {"ts": _microseconds(start), "dur": _microseconds(duration)}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": row, **times}


def _named(what: str, process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


# The text table of a profile: the seconds of an iteration by phase, kind of operation and span.


NAMES = 3  # largest operations that a row names
SPANS = 15  # rows of spans
SHORTEST = 0.001  # of the iteration: kinds below it are left out

PYTHON = "python, between operations"
OTHER = "other operations"

_KINDS: dict[str, str] = tomllib.loads((files(__package__) / "kinds.toml").read_text(encoding="utf-8"))
_NUMBER = re.compile(r" \d+\b")
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS.items())
_BACKENDS = ("gloo:", "nccl:")  # PyTorch names their collectives by spans
_OF_AUTOGRAD = ("Backward", "Backward0")
KINDS = (*_KINDS, OTHER, PYTHON)


def kind_of(event: Event) -> str:
    """Return the kind of work that an event does on its own.

    A span on its own is the Python code between the operations within it, and so are autograd's own events.

    >>> kind_of(Event("aten::addmm", "cpu_op", "t", 0, 1)), kind_of(Event("aten::copy_", "cpu_op", "t", 0, 1))
    ('matrix products', 'copies and casts')
    """
    if event.category == SPAN and not event.name.startswith(_BACKENDS):
        return PYTHON
    if event.category not in KERNELS and ("evaluate_function" in event.name or event.name.endswith(_OF_AUTOGRAD)):
        return PYTHON
    return next((kind for kind, pattern in _PATTERNS if pattern.search(event.name)), OTHER)


def seconds_by_kind(events: Sequence[Event]) -> dict[str, Counter[str]]:
    """Return the seconds that operations took on their own, by kind and by name; threads add up."""
    seconds: dict[str, Counter[str]] = {}
    for event, nanoseconds in self_times(events):
        seconds.setdefault(kind_of(event), Counter())[event.name] += nanoseconds / 1e9  # type: ignore[assignment]
    return seconds


def table(loop: ProcessTrace, processes: Sequence[ProcessTrace], iteration: int) -> str:
    """Return the table.

    Args:
        loop: The phases of the main loop.
        processes: The worker processes.
        iteration: Which one was recorded.
    """
    wall = max((loop.end - loop.start) / 1e9, 1e-9)
    lines = [f"iteration {iteration}: {wall:.3f} s"]
    phases: Counter[str] = Counter()
    for event in loop.events:
        phases[event.name] += event.duration / 1e9  # type: ignore[assignment]
    phases["between phases"] = max(0.0, wall - sum(phases.values()))  # type: ignore[assignment]
    lines += ["", "main loop", *_rows(((name, seconds, "") for name, seconds in phases.most_common()), wall)]
    for process in processes:
        lines += ["", process.name, *_rows(_work(process), wall)]
        gpus = [event for event in process.events if event.category in KERNELS]
        if gpus:
            lines += ["", f"{process.name}, kernels", *_rows(_kinds(gpus), wall)]
        lines += ["", f"{process.name}, spans", *_rows(_spans(process), wall)]
        if process.dropped:
            lines.append(f"  {process.dropped:,} events and waits are left out, as there were too many")
    return "\n".join(lines) + "\n"


def _work(process: ProcessTrace) -> Iterator[tuple[str, float, str]]:
    yield from _kinds([event for event in process.events if event.category not in KERNELS])
    seconds = sum(end - start for start, end in idle_times(process)) / 1e9
    yield "idle", seconds, ""


def _kinds(events: Sequence[Event]) -> Iterator[tuple[str, float, str]]:
    by_kind = seconds_by_kind(events)
    for kind in sorted(by_kind, key=lambda kind: (-sum(by_kind[kind].values()), KINDS.index(kind))):
        names = ", ".join(f"{_short(name)} {seconds:.3f}" for name, seconds in by_kind[kind].most_common(NAMES))
        yield kind, sum(by_kind[kind].values()), names


def _spans(process: ProcessTrace) -> Iterator[tuple[str, float, str]]:
    """Yield the longest spans, including everything within them; a span within another counts in both.

    Those that differ in a number are one row: all micro-batches, all steps. FSDP2's own are in the trace only.
    """
    seconds: Counter[str] = Counter()
    number: Counter[str] = Counter()
    for event in process.events:
        if event.category == SPAN and not event.name.startswith("FSDP::"):
            name = _NUMBER.sub("", event.name)
            seconds[name] += event.duration / 1e9  # type: ignore[assignment]
            number[name] += 1
    for name, total in seconds.most_common(SPANS):
        yield name, total, f"{number[name]} x"


def _rows(rows: Iterator[tuple[str, float, str]], wall: float) -> Iterator[str]:
    for name, seconds, rest in rows:
        if seconds >= SHORTEST * wall:
            yield f"  {_short(name):<32} {seconds:>9.3f} s {100 * seconds / wall:>5.1f} %  {rest}".rstrip()


def _short(name: str) -> str:
    name = name.removeprefix("aten::")
    return name if len(name) <= 48 else name[:45] + "..."


CLOCK_READINGS = 5  # of another machine's clock; the fastest counts


@dataclass(eq=False)
class IterationProfiler:
    """Records the iterations that the flags name, while the loop works on them.

    Attributes:
        profiling: The flags.
        output_dir: The folder of the run.
        trainer: The trainer, if there is one.
        rollout: The rollout process.
        workers: Watches both.
        on_phase: Called with every phase too.
    """

    profiling: ProfilingArguments
    output_dir: str
    trainer: TrainDriver | None
    rollout: RolloutDriver
    workers: Workers
    on_phase: Callable[[str | None], None] = lambda name: None
    _loop: LoopPhases = field(default_factory=LoopPhases)
    _has_begun: bool = False

    def phase(self, name: str | None) -> None:
        """Note the phase of the loop."""
        self._loop.phase(name)
        self.on_phase(name)

    def iteration(self, number: int) -> AbstractContextManager[None]:
        """Record the block if the flags name the iteration.

        A run that resumes after those iterations reports it, unless an earlier attempt has recorded them.
        """
        if not self._has_begun:
            self._has_begun = True
            self._note_missed(number)
        return self._recorded(number) if number in self.profiling.iterations else nullcontext()

    @contextmanager
    def _recorded(self, number: int) -> Iterator[None]:
        # Starting and stopping take seconds, and the processes wait: both are outside the recording.
        trainers = [] if self.trainer is None else self.trainer.profiled
        starting = [actor.start_profile.remote() for actor in trainers]
        self.rollout.start_profile()
        self.workers.results(starting)
        self._loop.begin()
        yield
        loop = self._loop.end(clock_name())
        stopping = [actor.stop_profile.remote() for actor in trainers]
        of_rollout = self.rollout.stop_profile()
        traces = [*self.workers.results(stopping), of_rollout]
        pairs = zip([*trainers, self.rollout.worker], traces, strict=True)
        processes = [self._by_own_clock(actor, trace) for actor, of_actor in pairs for trace in of_actor]
        self._write(number, loop, [process.within(loop) for process in processes])

    def _note_missed(self, first: int) -> None:
        """Name the iterations that are done before the first one of this process and were never recorded."""
        missed = [each for each in self.profiling.iterations if each < first and not self._trace(each).is_file()]
        if missed:
            which = f"iteration {missed[0]}" if len(missed) == 1 else f"iterations {missed[0]} to {missed[-1]}"
            print(
                f"note: --profile: the run continues with iteration {first}, so {which} cannot be recorded; give "
                f"--profile-step-start {first} or more",
                flush=True,
            )

    def _by_own_clock(self, actor: Any, trace: ProcessTrace) -> ProcessTrace:
        """Return the recording of a process, by this machine's clock."""
        if trace.clock == clock_name():
            return trace
        readings = []
        for _ in range(CLOCK_READINGS):
            before = time.time_ns()
            _, there = self.workers.results([actor.read_clock.remote()])[0]
            readings.append((before, there, time.time_ns()))
        return trace.shifted(-clock_offset(readings))

    def _trace(self, number: int) -> Path:
        return Path(self.output_dir, FOLDER) / f"iteration_{number}.json.gz"

    def _write(self, number: int, loop: ProcessTrace, processes: list[ProcessTrace]) -> None:
        """Write both files. A full disk does not end the run."""
        trace = self._trace(number)
        try:
            trace.parent.mkdir(parents=True, exist_ok=True)
            write_trace(trace, [loop, *processes])
            trace.with_name(f"iteration_{number}.txt").write_text(table(loop, processes, number), encoding="utf-8")
        except OSError as error:
            with suppress(OSError):
                trace.unlink()  # half of it would seem to be the whole
            why = disk_fault(trace, error) or error
            print(f"note: --profile: {trace} was not written, because {why}", file=sys.stderr)
            return
        print(f"note: --profile: {trace} opens in https://ui.perfetto.dev; the table is alongside it", flush=True)
