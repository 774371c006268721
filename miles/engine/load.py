"""Measure how much an engine has to do: the share of the time with requests, and the responses in flight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from miles.engine.base import Engine, Generation, GenerationRequest
from miles.engine.wrapper import EngineWrapper
from miles.types.metrics import Metric


class EngineLoad:
    """Adds up the time with requests, from the first request on, and from each reading on.

    A response is in flight from its request to its answer, also while it waits for a place in the engine.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began: float | None = None  # of what is added up; None before the first request
        self._counted = 0.0  # the time up to which seconds are added up
        self._in_flight = 0
        self._busy = 0.0  # seconds with a response in flight
        self._response_seconds = 0.0

    @contextmanager
    def answering(self, responses: int) -> Iterator[None]:
        """Count ``responses`` as in flight until the block ends, even by an error."""
        self._count()
        self._in_flight += responses
        try:
            yield
        finally:
            self._count()
            self._in_flight -= responses

    def metrics(self) -> dict[str, Metric]:
        """Return what was measured since the last reading, and reset it; empty before the first request.

        ``perf/engine_busy`` is the share of the time with a response in flight, and ``perf/engine_responses`` the mean
        number of these in that time.
        """
        if self._began is None:
            return {}
        self._count()
        found = {
            "perf/engine_busy": Metric(self._busy, self._counted - self._began),
            "perf/engine_responses": Metric(self._response_seconds, self._busy),
        }
        self._began, self._busy, self._response_seconds = self._counted, 0.0, 0.0
        return {name: metric for name, metric in found.items() if metric.denominator}

    def _count(self) -> None:
        now = self._clock()
        if self._began is None:
            self._began = self._counted = now
        if self._in_flight:
            self._busy += now - self._counted
            self._response_seconds += (now - self._counted) * self._in_flight
        self._counted = now


class MeteredEngine(EngineWrapper):
    """Reports each request to ``load``."""

    def __init__(self, engine: Engine, load: EngineLoad) -> None:
        super().__init__(engine)
        self._load = load

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return what the engine answers."""
        with self._load.answering(len(request.seeds)):
            return await super().generate(request)
