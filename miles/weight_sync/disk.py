"""Weights through a file system that sender and engines share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file

from miles.weight_sync.transport import Delivery, WeightReceiver, stream
from miles.weights import WeightChunk


class DiskTransport:
    """One safetensors file a chunk, in a folder that appears whole or not at all; the last one sent is kept.

    The folder of an update is ``version_0000012`` in ``root``, and the one before it goes when it is there: engines may
    still have files of the old one mapped, which the kernel keeps for them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        folder = await self.write(chunks, version)

        async def load(receiver: WeightReceiver) -> None:
            await receiver.load_folder(str(folder), version)

        await delivery.each(load)

    async def write(self, chunks: Iterable[WeightChunk], version: int) -> Path:
        """Write the weights; returns their folder. Raises ``OSError`` as the file system does."""
        staging = self._root / f".writing_version_{version:07d}"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        number = 0
        async for chunk, _ in stream(chunks):
            tensors = {name: tensor.contiguous() for name, tensor in chunk.tensors.items()}
            await asyncio.to_thread(save_file, tensors, staging / f"model-{number:05d}.safetensors", {"format": "pt"})
            number += 1
        for earlier in self._root.glob("version_*"):
            shutil.rmtree(earlier)
        return staging.rename(self._root / f"version_{version:07d}")
