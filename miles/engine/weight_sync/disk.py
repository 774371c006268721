"""Send weights through a file system that the sender and the engines share (``disk``)."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from miles.base.host.disk_faults import naming_disk
from miles.base.threads import in_thread
from miles.engine.weight_sync.delta_files import MAKE_ROOM
from miles.engine.weight_sync.local_copy import WeightFolder
from miles.engine.weight_sync.transport import Delivery, WeightReceiver, stream
from miles.types.weights import WeightChunk


class DiskTransport:
    """Write one safetensors file per chunk, into a folder that appears whole or not at all.

    The folder of an update is ``version_0000012`` in ``root``. Only the last one is kept: the one before it is removed
    when the new one is complete. Engines may still have files of the old one mapped, which the kernel keeps for them.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Write the weights, then have every receiver load the folder."""
        folder = await self.write(chunks, version)

        async def load(receiver: WeightReceiver) -> None:
            await receiver.load_folder(folder, version)

        await delivery.each(load)

    def forget_all_but(self, urls: Collection[str]) -> None:
        """Keep nothing: a folder belongs to no engine."""

    async def write(self, chunks: Iterable[WeightChunk], version: int) -> WeightFolder:
        """Write the weights and return their folder. Raises ``WriteFailed`` if the disk is full."""
        folder, staging = self._root / f"version_{version:07d}", self._root / f".writing_version_{version:07d}"
        with naming_disk(folder, staging, then=MAKE_ROOM, failures=(OSError, SafetensorError)):
            for unfinished in self._root.glob(".writing_version_*"):  # of a run that was killed
                shutil.rmtree(unfinished)
            staging.mkdir(parents=True)
            number = 0
            async for chunk, _ in stream(chunks):
                tensors = {name: tensor.contiguous() for name, tensor in chunk.tensors.items()}
                path = staging / f"model-{number:05d}.safetensors"
                await in_thread(save_file, tensors, path, {"format": "pt"})
                number += 1
            for earlier in self._root.glob("version_*"):
                shutil.rmtree(earlier)
            return WeightFolder.of(staging.rename(folder))
