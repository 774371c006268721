"""The protocols of a weight update: a transport sends, a receiver takes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from typing import Protocol

from miles.base.threads import in_thread
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.types.weights import WeightChunk


class WeightReceiver(Protocol):
    """Receive weights as one engine of ``num_ranks`` processes.

    Every method raises if the engine refuses or does not answer.
    """

    url: str
    num_ranks: int

    async def begin_update(self) -> None:
        """Open an update. Every ``receive_broadcast`` and ``receive_shared`` happens inside one."""

    async def end_update(self) -> None:
        """Close the update: the new weights are complete."""

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``, which the engine's host must see."""

    async def load_copy(self, source: CopySource, version: int) -> None:
        """Have the engine's host bring its copy of the weights up to date, then read all weights from the copy.

        Raises ``DeltaRefused`` if the host cannot follow the delta that ``source`` offers.
        """

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Join the process group ``group`` at ``host:port`` as its ranks 1 to ``num_ranks``.

        Returns when the group is complete. ``backend`` is gloo or nccl.
        """

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Take part in one broadcast from rank 0 per tensor, in the order of ``chunk``; return when all are loaded."""

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Load tensors from shared memory: ``payloads`` holds one pickled list of (name, tensor) per rank.

        The tensors have ``nbytes`` bytes.
        """

    async def scramble(self) -> None:
        """Overwrite every weight with random numbers, so that a weight that is never sent shows."""

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight as the engine holds it, by rank and by the engine's own name."""


class Delivery:
    """The receivers of one update. One that fails is left out from then on; the others continue."""

    def __init__(self, receivers: Sequence[WeightReceiver]) -> None:
        self.receivers = list(receivers)
        self.failures: dict[str, Exception] = {}  # by URL

    @property
    def alive(self) -> list[WeightReceiver]:
        """The receivers that have not failed."""
        return [receiver for receiver in self.receivers if receiver.url not in self.failures]

    async def each(self, call: Callable[[WeightReceiver], Awaitable[None]]) -> None:
        """Make the same call for every live receiver, concurrently; return when all have answered or failed."""
        alive = self.alive
        results = await asyncio.gather(*(call(receiver) for receiver in alive), return_exceptions=True)
        for receiver, result in zip(alive, results, strict=True):
            if isinstance(result, Exception):
                self.failures[receiver.url] = result
            elif isinstance(result, BaseException):
                raise result


class Transport(Protocol):
    """Carry weights to engines."""

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all receivers. ``delivery`` collects the failures."""

    def forget_all_but(self, urls: Collection[str]) -> None:
        """Drop the state of engines at other addresses than ``urls``: these engines are gone, or have restarted.

        By default a transport keeps nothing of an engine.
        """
        return None


async def stream(chunks: Iterable[WeightChunk]) -> AsyncIterator[tuple[WeightChunk, bool]]:
    """Yield each chunk, and whether it is the last. A thread fetches them; two are in memory at once."""
    iterator = iter(chunks)
    chunk = await in_thread(next, iterator, None)
    while chunk is not None:
        following = await in_thread(next, iterator, None)
        yield chunk, following is None
        chunk = following
