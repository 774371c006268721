"""One server whose devices are on several nodes: a process on each, which meet at an address of the first one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles.engine.base import ServerPart
from miles.engine.weight_sync.deltas import CopySource, WeightFolder


class SpanningServer:
    """Start and stop the processes of a server together; ``miles.engine.base.Server``.

    The process of the first node answers all requests and passes on to the others what concerns them: generation, new
    weights, pauses, memory. If one of them ends, the first no longer generates, which the health checks find out.
    """

    def __init__(self, parts: Sequence[ServerPart]) -> None:
        """Combine the processes of the nodes, the one that answers first."""
        self._parts = list(parts)
        self.name = f"{parts[0].name} ({len(parts)} nodes)"

    async def start(self) -> str:
        """Start all processes, wait until they serve, and return the URL of the first.

        Raises:
            ServerFailed: One of them does not start. The others are stopped: they would wait for it.
        """
        meeting = await self._parts[0].meeting_address()
        starts = [asyncio.ensure_future(part.start(meeting)) for part in self._parts]
        try:
            urls: list[str] = await asyncio.gather(*starts)
        except BaseException:
            await self.stop()
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        return urls[0]

    async def ending(self) -> str:
        """Return what has ended the first of the processes that have ended."""
        return next(filter(None, await asyncio.gather(*(part.ending() for part in self._parts))), "")

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(part.stop() for part in self._parts))

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring the copy of the weights on every node up to date, and return it: it is the same on all."""
        folders = await asyncio.gather(*(part.update_copy(source) for part in self._parts))
        return folders[0]
