"""Name parts of the work, so that they appear in the trace of ``--profile``.

A span costs one comparison while nothing is recorded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

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


def begin(by_torch: bool = True) -> Recording:
    """Record from now on; spans and waits that are open already are left out.

    ``by_torch`` False records the spans here, for a process that imports no torch.
    """
    global _recording
    _recording = Recording(spans=None if by_torch else [])
    return _recording


def end() -> None:
    """Stop recording."""
    global _recording
    _recording = None


def is_recording() -> bool:
    """Return whether this process is recorded."""
    return _recording is not None


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
    """Name what a coroutine waits for until the block ends. Many of them overlap in one thread."""
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
        """Begin a span. There is no barrier, which would change what is measured."""
        began = span(self._name)
        began.__enter__()
        self._open.setdefault(self._name, []).append(began)

    def stop(self, barrier: bool = False) -> None:
        """End the span that began last under this name."""
        self._open[self._name].pop().__exit__(None, None, None)


@contextmanager
def named_by_timers(config: Any) -> Iterator[None]:
    """Have Megatron name its work within the block, if a profile is recorded; ``config`` is the model's."""
    if not is_recording():
        yield
        return
    before, config.timers = config.timers, SpanTimers()
    try:
        yield
    finally:
        config.timers = before
