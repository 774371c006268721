"""Name parts of the work, so that they appear in the trace of ``--profile``.

A span costs one comparison while nothing is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

MOST_WAITS = 20_000  # that are kept of one recording; later ones are counted only

_NOTHING: AbstractContextManager[Any] = nullcontext()


@dataclass
class Recording:
    """What is recorded of this process beside the operations of PyTorch.

    Attributes:
        waits: Name, begin and end of each wait, in nanoseconds since 1970.
        dropped: How many waits were not kept.
    """

    waits: list[tuple[str, int, int]] = field(default_factory=list)
    dropped: int = 0


_recording: Recording | None = None


def begin() -> Recording:
    """Record from now on; spans and waits that are open already are left out."""
    global _recording
    _recording = Recording()
    return _recording


def end() -> None:
    """Record no longer."""
    global _recording
    _recording = None


def is_recording() -> bool:
    """Return whether this process is recorded."""
    return _recording is not None


def span(name: str) -> AbstractContextManager[Any]:
    """Name the work of this thread until the block ends. Blocks nest."""
    if _recording is None:
        return _NOTHING
    from torch.profiler import record_function  # not at the top: torch takes seconds

    return record_function(name)


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
