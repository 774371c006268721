"""Send weights through the shared memory of one host (``ipc``)."""

import io
import logging
from collections.abc import Iterable
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing as mp

from miles.base.threads import in_thread
from miles.engine.weight_sync.transport import Delivery, Transport, WeightReceiver, stream
from miles.types.weights import WeightChunk

TRIES = 60  # to share a tensor. PyTorch gives its helper process 1 s for each, too little on a very busy machine

log = logging.getLogger(__name__)


class SharedMemoryTransport(Transport):
    """Copy each chunk into shared memory once. Engines get handles and copy from there, to whatever device they use."""

    def __init__(self) -> None:
        # Use named files. The other strategy passes file descriptors through a socket of the sender, which a process
        # that the sender did not start may not open; a server that tries dies.
        mp.set_sharing_strategy("file_system")

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Share the chunks one after the other; each is freed when all receivers have copied it."""
        await delivery.each(lambda receiver: receiver.begin_update())
        async for chunk, last in stream(chunks):
            shared = await in_thread(_share, chunk)

            async def receive(
                receiver: WeightReceiver,
                shared: list[tuple[str, torch.Tensor]] = shared,
                nbytes: int = chunk.nbytes,
                last: bool = last,
            ) -> None:
                # A process that unpickles a handle keeps it, so each process gets its own.
                payloads = [_pickled(shared) for _ in range(receiver.num_ranks)]
                await receiver.receive_shared(payloads, nbytes, version, last)

            await delivery.each(receive)
        await delivery.each(lambda receiver: receiver.end_update())


def _share(chunk: WeightChunk) -> list[tuple[str, torch.Tensor]]:
    return [(name, _in_shared_memory(tensor)) for name, tensor in chunk.tensors.items()]


def _in_shared_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in shared memory. Try again while PyTorch's ``torch_shm_manager`` does not answer in time.

    An answer that comes late is read by the next try: every answer is the same "OK" (torch/lib/libshm/socket.h).

    Raises:
        RuntimeError: It did not answer ``TRIES`` times, or memory cannot be shared.
    """
    copied = tensor.detach().clone()
    for tries in range(1, TRIES + 1):
        try:
            copied.share_memory_()
            return copied
        except RuntimeError as error:
            if "has timed out" not in str(error) or tries == TRIES:
                raise
            log.warning("PyTorch's shared-memory manager has not answered for %d s; trying again", tries)
    raise AssertionError("the last try returns or raises")


def _pickled(shared: list[tuple[str, torch.Tensor]]) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(shared)
    return buffer.getvalue()
