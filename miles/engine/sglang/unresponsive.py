"""Servers that are not restarted: one that passes no health check is told of, and ends the run when it stays so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Mapping

from miles.engine.sglang.sglang_client import EngineUnavailable, RequestRefused

log = logging.getLogger(__name__)


class UnresponsiveServerMonitor:
    """How long each server, router included, has passed no health check."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` of silence are too many."""
        self._seconds = seconds
        self._since: dict[str, float] = {}  # by time.monotonic()

    def forget(self) -> None:
        """A time begins in which nobody looks: it counts for nobody."""
        self._since.clear()

    async def look(self, checks: Mapping[str, Awaitable[object]]) -> None:
        """Await the check of each server, which is ``False`` where it could not look.

        Warns of one that begins to fail, and raises ``RuntimeError`` for one that fails on.
        """
        began = time.monotonic()
        results = await asyncio.gather(*checks.values(), return_exceptions=True)
        for name, result in zip(checks, results, strict=True):
            if isinstance(result, EngineUnavailable):
                self._tell(name, began, result)
            elif isinstance(result, BaseException) and not isinstance(result, RequestRefused):  # which is an answer
                raise result
            elif self._since.pop(name, None) is not None and result is not False:
                log.warning("%s passes its health check again", name)

    def _tell(self, name: str, began: float, failure: EngineUnavailable) -> None:
        if name not in self._since:
            self._since[name] = began
            log.warning(
                "%s does not pass its health check (%s); requests to it may wait in vain. Unless it recovers, the run "
                "stops in %g s (--worker-timeout); with --use-fault-tolerance it would be restarted",
                name,
                failure,
                self._seconds,
            )
            return
        silent = time.monotonic() - self._since[name]
        if silent > self._seconds:
            raise RuntimeError(
                f"{name} has passed no health check for {silent:.0f} s (--worker-timeout), at last: "
                f"{failure}; its log file may say why; with --use-fault-tolerance it would be restarted"
            ) from failure
