"""Send weights through a file system that the sender and the engines share (``disk``)."""

import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from miles.base.disk_faults import naming_disk
from miles.base.threads import in_thread
from miles.engine.weight_sync.deltas import MAKE_ROOM, CopySource, DeltaRefused, OfferedWeights, WeightFolder
from miles.engine.weight_sync.transport import Delivery, Transport, WeightReceiver, stream
from miles.types.weights import WeightChunk


class DiskTransport(Transport):
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


# Send only what has changed, through a file system that the trainer and the engines' hosts share (``disk-delta``).
#
# ::
#
#     trainer rank 0 ── DeltaWriter ──> delta_0000012/ ── LocalCopy of each host ──> engine
#           │                           (shared folder)        │ cannot follow: DeltaRefused
#           └────── all weights <──── OfferedWeights ──────────┘
#
# The trainer compares its weights with those that it sent last. Each host that has engines keeps a copy of all weights,
# applies the delta to it, compares the checksums of all tensors, and its engines load the copy. On any doubt (another
# base, a file that is missing, cut or altered, a checksum that differs, a host without a copy) all weights are sent,
# and become the host's copy if their checksums are right too.


class DiskDeltaTransport(Transport):
    """Have the hosts follow the delta of weights that offer one; write all weights for those that do not."""

    def __init__(self, root: Path, copies: str | None) -> None:
        """Use the shared folder ``root``, and the folder ``copies`` of each host (None: the temporary folder)."""
        self._root = root.absolute()
        self._copies = copies
        self._files = DiskTransport(self._root / "whole")

    async def send(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Send the delta if there is one, then all weights to the receivers that lack them."""
        updated: set[str] = set()  # by URL
        result = None
        if isinstance(chunks, OfferedWeights):
            updated = await self._offer(delivery, chunks, version)
            result = chunks.offer.result
        if all(receiver.url in updated for receiver in delivery.alive):
            return
        folder = await self._files.write(chunks, version)
        source = CopySource(uuid.uuid4().hex, folder.path, None, self._copies, str(self._root), result)

        async def adopt(receiver: WeightReceiver) -> None:
            if receiver.url not in updated:
                await receiver.load_copy(source, version)

        await delivery.each(adopt)
        shutil.rmtree(folder.path)

    async def _offer(self, delivery: Delivery, weights: OfferedWeights, version: int) -> set[str]:
        """Offer the delta to all receivers; return the URLs of those that have followed it."""
        source = CopySource(weights.offer.result, None, weights.offer, self._copies, str(self._root))
        followed: set[str] = set()

        async def follow(receiver: WeightReceiver) -> None:
            try:
                await receiver.load_copy(source, version)
                followed.add(receiver.url)
            except DeltaRefused as refusal:
                weights.refuse(f"the engine at {receiver.url}", refusal)

        await delivery.each(follow)
        return followed
