"""Weights through the shared memory of one host: ``--update-weight-transfer-mode ipc``."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

from miles.weight_sync.transport import Delivery, WeightReceiver, stream
from miles.weights import WeightChunk


class SharedMemoryTransport:
    """A chunk is copied into shared memory once; engines get handles to it and copy from there, to whatever device."""

    def __init__(self) -> None:
        # Named files: the other strategy passes file descriptors through a socket of the sender's, which a process that
        # the sender has not started may not open; a server that tries dies.
        mp.set_sharing_strategy("file_system")

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        await delivery.each(lambda receiver: receiver.begin_update())
        async for chunk, last in stream(chunks):
            shared = await asyncio.to_thread(_share, chunk)

            async def receive(
                receiver: WeightReceiver, shared: list[tuple[str, torch.Tensor]] = shared, last: bool = last
            ) -> None:
                # Unpickling takes a handle over for good, so each process gets one of its own.
                payloads = [_pickled(shared) for _ in range(receiver.num_ranks)]
                await receiver.receive_shared(payloads, version, last)

            await delivery.each(receive)
        await delivery.each(lambda receiver: receiver.end_update())


def _share(chunk: WeightChunk) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach().clone().share_memory_()) for name, tensor in chunk.tensors.items()]


def _pickled(shared: list[tuple[str, torch.Tensor]]) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return buffer.getvalue()
