"""Pass every call on to another engine: the base of engines that change some calls."""

from __future__ import annotations

from collections.abc import Iterable

from miles.engine.base import Engine, Generation, GenerationRequest
from miles.types.weights import WeightChunk


class EngineWrapper:
    """Implements ``miles.engine.base.Engine`` by the calls of another engine. A subclass overrides what it changes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return what the engine answers."""
        return await self._engine.generate(request)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Update the engine's weights."""
        await self._engine.update_weights(chunks, version)

    async def pause(self) -> None:
        """Pause the engine."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Resume the paused engine."""
        await self._engine.resume()

    async def abort(self) -> None:
        """Abort what is in flight."""
        await self._engine.abort()

    async def health(self) -> bool:
        """Return whether the engine can serve requests."""
        return await self._engine.health()

    async def close(self) -> None:
        """Close the engine."""
        await self._engine.close()
