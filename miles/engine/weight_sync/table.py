"""The weight transports, by the names that ``--update-weight-transfer-mode`` gives them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from miles.engine.weight_sync.broadcast import BroadcastTransport
from miles.engine.weight_sync.disk import DiskDeltaTransport, DiskTransport
from miles.engine.weight_sync.shared_memory import SharedMemoryTransport
from miles.engine.weight_sync.transport import Transport


@dataclass(frozen=True)
class SendingSide:
    """Describe the sender.

    Attributes:
        folder: Where weights on disk are written.
        broadcast_from: The device that broadcasts start from.
        copies: The folder of the copies that engines' hosts keep; None for the folder of temporary files.
    """

    folder: Path
    broadcast_from: torch.device
    copies: str | None = None


TRANSPORTS: dict[str, Callable[[SendingSide], Transport]] = {
    "disk": lambda sender: DiskTransport(sender.folder),
    "disk-delta": lambda sender: DiskDeltaTransport(sender.folder, sender.copies),
    "broadcast": lambda sender: BroadcastTransport(sender.broadcast_from),
    "ipc": lambda sender: SharedMemoryTransport(),
}


def build_transport(mode: str, sender: SendingSide) -> Transport:
    """Build the transport that ``--update-weight-transfer-mode`` names.

    Raises:
        ValueError: If no transport has this name.
    """
    if mode not in TRANSPORTS:
        raise ValueError(f"--update-weight-transfer-mode {mode}: unknown; choose from {', '.join(TRANSPORTS)}")
    return TRANSPORTS[mode](sender)
