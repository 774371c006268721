"""Update the weights of all engines over the chosen transport, and check what arrived if asked to."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import torch

from miles.config.servers.flags import SglangArguments
from miles.engine.weight_sync.broadcast import BroadcastTransport
from miles.engine.weight_sync.disk import DiskDeltaTransport, DiskTransport
from miles.engine.weight_sync.shared_memory import SharedMemoryTransport
from miles.engine.weight_sync.transport import Delivery, Transport, WeightReceiver
from miles.types.weights import WeightChunk

# The weight transports, by the names that ``--update-weight-transfer-mode`` gives them.


# Each is given the folder of weights on disk, the device that broadcasts start from, and the folder of the copies that
# engines' hosts keep, or None for the folder of temporary files.
TRANSPORTS: dict[str, Callable[[Path, torch.device, str | None], Transport]] = {
    "disk": lambda folder, device, copies: DiskTransport(folder),
    "disk-delta": lambda folder, device, copies: DiskDeltaTransport(folder, copies),
    "broadcast": lambda folder, device, copies: BroadcastTransport(device),
    "ipc": lambda folder, device, copies: SharedMemoryTransport(),
}


class WeightSender:
    """Send weights to any number of engines, and report which of them failed."""

    def __init__(self, sglang: SglangArguments, folder: Path, broadcast_from: torch.device | None = None) -> None:
        """Build the transport.

        Args:
            sglang: The flags of the engines.
            folder: Where weights on disk are written.
            broadcast_from: The GPU that broadcasts start from; None for the host.
        """
        device = torch.device("cpu") if broadcast_from is None else broadcast_from
        transport = TRANSPORTS[sglang.update_weight_transfer_mode]
        self._transport = transport(folder, device, sglang.update_weight_copy_dir)
        self._check_files = DiskTransport(folder) if sglang.check_weight_update_equal else None

    async def send(
        self, receivers: Sequence[WeightReceiver], chunks: Iterable[WeightChunk], version: int
    ) -> dict[str, Exception]:
        """Replace the weights of ``receivers``.

        ``chunks`` is iterated once, or twice under ``--check-weight-update-equal``.

        Returns:
            The failures by URL. A receiver that failed holds unknown weights.

        Raises:
            ValueError: If ``--check-weight-update-equal`` finds a difference.
        """
        delivery = Delivery(receivers)
        if self._check_files is None:
            await self._transport.send(delivery, chunks, version)
        else:
            await self._send_checked(self._check_files, delivery, chunks, version)
        return delivery.failures

    def forget_all_but(self, urls: Collection[str]) -> None:
        """Drop the state of engines at other addresses than ``urls``: these engines are gone, or have restarted."""
        self._transport.forget_all_but(urls)

    async def _send_checked(
        self, files: DiskTransport, delivery: Delivery, chunks: Iterable[WeightChunk], version: int
    ) -> None:
        """Send, then compare what arrived with the same weights loaded from a file, tensor by tensor.

        Engines fuse, shard and rename what they load, so the trainer's tensors have no checksum to compare with. The
        engine's own loader, fed from a file, makes the checksums instead. The weights are scrambled before both loads,
        so that a tensor that no chunk brings differs too. A difference is a ``ValueError``, not the failure of one
        engine.
        """
        await delivery.each(lambda receiver: receiver.scramble())
        await self._transport.send(delivery, chunks, version)
        arrived: dict[str, dict[str, str]] = {}
        expected: dict[str, dict[str, str]] = {}
        folder = await files.write(chunks, version)

        async def compare(receiver: WeightReceiver) -> None:
            arrived[receiver.url] = await receiver.checksums()
            await receiver.scramble()
            await receiver.load_folder(folder, version)
            expected[receiver.url] = await receiver.checksums()

        await delivery.each(compare)
        for url in expected:
            check_equal(url, arrived[url], expected[url])


def check_equal(url: str, arrived: dict[str, str], expected: dict[str, str]) -> None:
    """Raise ``ValueError`` naming the tensors whose checksums differ."""
    names = [name for name in sorted(arrived.keys() | expected.keys()) if arrived.get(name) != expected.get(name)]
    if names:
        text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"--check-weight-update-equal: {len(names)} of {len(expected)} tensors of the engine at {url} are not what "
            f"was sent ({text}); try another --update-weight-transfer-mode, and report the model that shows it"
        )
