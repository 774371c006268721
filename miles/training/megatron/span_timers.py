"""Megatron's timers as spans: its schedule names forward, backward and the exchange between stages by them.

``megatron/core/pipeline_parallel/schedules.py`` and ``p2p_communication.py`` call
``config.timers(name, log_level=2).start()`` and ``config.timers(name).stop()``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from miles.profiling.spans import is_recording, span


class SpanTimers:
    """Takes the place of Megatron's ``Timers`` while a profile is recorded."""

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
