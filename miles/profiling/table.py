"""The text table of a profile: where the seconds of the iteration went."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from miles.profiling.kinds import KINDS, kind_of
from miles.profiling.process_trace import KERNELS, SPAN, Event, ProcessTrace, idle_times, self_times

NAMES = 3  # operations that a row names
SPANS = 15  # rows of spans
SHORTEST = 0.001  # of the iteration: kinds below it are left out

_NUMBER = re.compile(r" \d+\b")


def seconds_by_kind(events: Sequence[Event]) -> dict[str, Counter[str]]:
    """Return the seconds that operations took by themselves, by kind and by name; threads add up."""
    seconds: dict[str, Counter[str]] = {}
    for event, own in self_times(events):
        seconds.setdefault(kind_of(event), Counter())[event.name] += own / 1e9  # type: ignore[assignment]
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
            lines.append(f"  {process.dropped:,} of the shortest events are left out")
    return "\n".join(lines) + "\n"


def _work(process: ProcessTrace) -> Iterator[tuple[str, float, str]]:
    yield from _kinds([event for event in process.events if event.category not in KERNELS])
    idle = sum(end - start for start, end in idle_times(process)) / 1e9
    yield "idle", idle, ""


def _kinds(events: Sequence[Event]) -> Iterator[tuple[str, float, str]]:
    found = seconds_by_kind(events)
    for kind in sorted(found, key=lambda kind: (-sum(found[kind].values()), KINDS.index(kind))):
        names = ", ".join(f"{_short(name)} {seconds:.3f}" for name, seconds in found[kind].most_common(NAMES))
        yield kind, sum(found[kind].values()), names


def _spans(process: ProcessTrace) -> Iterator[tuple[str, float, str]]:
    """Yield the longest spans with all that is within them; a span within another counts in both.

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
