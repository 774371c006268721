"""What a transport of weights is, seen from the sender, and what it needs of an engine that receives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from miles.weights import WeightChunk


class WeightReceiver(Protocol):
    """One engine of ``num_ranks`` processes. Every method raises when the engine refuses or does not answer."""

    url: str
    num_ranks: int

    async def begin_update(self) -> None:
        """Open an update; the chunks of ``receive_broadcast`` and ``receive_shared`` stand inside one."""

    async def end_update(self) -> None:
        """Close it: the new weights are whole."""

    async def load_folder(self, folder: str, version: int) -> None:
        """Read all weights from the safetensors files in ``folder``, which the engine's host must see."""

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Join the ``backend`` (gloo or nccl) group at ``host:port`` as its ranks 1 to ``num_ranks``.

        Returns when the group stands.
        """

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Take part in one broadcast from rank 0 a tensor, in the order of ``chunk``; returns when they are loaded."""

    async def receive_shared(self, payloads: Sequence[bytes], version: int, last: bool) -> None:
        """Load tensors from shared memory: one pickled list of (name, tensor) a rank."""

    async def scramble(self) -> None:
        """Overwrite every weight with random numbers, so that whatever is not sent shows."""

    async def checksums(self) -> dict[str, str]:
        """A checksum of every weight as the engine holds it, by rank and the engine's own name."""


class Delivery:
    """The receivers of one update; whoever fails is left out from then on, and the others go on."""

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        self.receivers = list(receivers)
        self.failures: dict[str, Exception] = {}  # by URL

    @property
    def alive(self) -> list[WeightReceiver]:
        """Those that have not failed."""
        return [receiver for receiver in self.receivers if receiver.url not in self.failures]

    async def each(self, call: Callable[[WeightReceiver], Awaitable[None]]) -> None:
        """Do the same with every live receiver, concurrently; returns when all have answered or failed."""
        alive = self.alive
        results = await asyncio.gather(*(call(receiver) for receiver in alive), return_exceptions=True)
        for receiver, result in zip(alive, results, strict=True):
            if isinstance(result, Exception):
                self.failures[receiver.url] = result
            elif isinstance(result, BaseException):
                raise result


class Transport(Protocol):
    """A way for weights to reach engines."""

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all receivers. Failures are left in ``delivery``."""


async def stream(chunks: Iterable[WeightChunk]) -> AsyncIterator[tuple[WeightChunk, bool]]:
    """Each chunk, and whether it is the last. Chunks are fetched on a thread, two in memory at a time."""
    iterator = iter(chunks)
    chunk = await asyncio.to_thread(next, iterator, None)
    while chunk is not None:
        following = await asyncio.to_thread(next, iterator, None)
        yield chunk, following is None
        chunk = following
