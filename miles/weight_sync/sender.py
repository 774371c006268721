"""An update of all engines' weights, by whichever transport, with or without the check that they arrived."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch

from miles.arguments.sglang.settings import SglangArguments
from miles.weight_sync.broadcast import BroadcastTransport
from miles.weight_sync.disk import DiskTransport
from miles.weight_sync.shared_memory import SharedMemoryTransport
from miles.weight_sync.transport import Delivery, Transport, WeightReceiver
from miles.weights import WeightChunk


class WeightSender:
    """Sends weights to any number of engines, and says which of them failed."""

    def __init__(self, sglang: SglangArguments, output_dir: Path, broadcast_from: torch.device | None = None) -> None:
        """``broadcast_from``: the GPU of ``BroadcastTransport``; None for the host."""
        self._broadcast_from = broadcast_from or torch.device("cpu")
        self._disk = DiskTransport(Path(sglang.update_weight_disk_dir or output_dir / "weights"))
        self._transport = self._build(sglang.update_weight_transfer_mode)
        self._check = sglang.check_weight_update_equal

    def _build(self, mode: str) -> Transport:
        if mode == "disk":
            return self._disk
        return BroadcastTransport(self._broadcast_from) if mode == "broadcast" else SharedMemoryTransport()

    async def send(
        self, receivers: Sequence[WeightReceiver], chunks: Iterable[WeightChunk], version: int
    ) -> dict[str, Exception]:
        """Replace the weights of ``receivers``; returns the failures by URL. The failed ones hold unknown weights.

        ``chunks`` is iterated once, or twice under ``--check-weight-update-equal``.
        """
        delivery = Delivery(receivers)
        if self._check:
            await self._send_checked(delivery, chunks, version)
        else:
            await self._transport.send(delivery, chunks, version)
        return delivery.failures

    def forget_all_but(self, urls: Collection[str]) -> None:
        """Keep no group with engines at other addresses than ``urls``: they are gone, or start anew."""
        if isinstance(self._transport, BroadcastTransport):
            self._transport.forget_all_but(urls)

    async def _send_checked(self, delivery: Delivery, chunks: Iterable[WeightChunk], version: int) -> None:
        """Send, and compare what arrived with the same weights loaded from a file, tensor by tensor.

        Engines fuse, shard and rename what they load, so the trainer's tensors have no checksum to compare with; the
        engine's own loader, fed from a file, makes it. Weights are scrambled before either way, so that a tensor which
        no chunk brings differs too. A difference is a ``ValueError``, not a failure of one engine.
        """
        await delivery.each(lambda receiver: receiver.scramble())
        await self._transport.send(delivery, chunks, version)
        arrived: dict[str, dict[str, str]] = {}
        expected: dict[str, dict[str, str]] = {}
        folder = await self._disk.write(chunks, version)

        async def compare(receiver: WeightReceiver) -> None:
            arrived[receiver.url] = await receiver.checksums()
            await receiver.scramble()
            await receiver.load_folder(str(folder), version)
            expected[receiver.url] = await receiver.checksums()

        await delivery.each(compare)
        for url in expected:
            check_equal(url, arrived[url], expected[url])


def check_equal(url: str, arrived: dict[str, str], expected: dict[str, str]) -> None:
    """Raise ``ValueError`` naming the tensors whose checksums differ."""
    names = [name for name in sorted(arrived.keys() | expected.keys()) if arrived.get(name) != expected.get(name)]
    if names:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise ValueError(
            f"--check-weight-update-equal: {len(names)} of {len(expected)} tensors of the engine at {url} are not what "
            f"was sent ({shown}); try another --update-weight-transfer-mode, and report the model that shows it"
        )
