"""The protocol by which a run offers devices, and places for server processes, to its engine.

The cluster implements ``EngineHost``; engines never see Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # server processes import this module before they start, and torch takes seconds
    import torch


class ServerFailed(RuntimeError):
    """A server process ended, or hung, before it served."""


class ServerProcess(Protocol):
    """Start and stop one server on the host where this object is."""

    def start(self) -> str:
        """Start the server, wait until it serves, and return its URL. Raises ``ServerFailed`` if it does not."""
        ...

    def stop(self) -> None:
        """End the server. Does nothing if it does not run."""
        ...


class Server(Protocol):
    """Start and stop one server from afar, for instance in an actor. ``name`` is how messages call it."""

    name: str

    async def start(self) -> str:
        """Start the server if it does not run, wait until it serves, and return its URL."""
        ...

    async def stop(self) -> None:
        """End the server, whatever state it is in."""
        ...


class EngineHost(Protocol):
    """Place an engine. ``device`` (cpu or cuda) is the one that the run computes on."""

    device: str

    def place_server(self, number: int, build: Callable[[str], ServerProcess], start_seconds: float) -> Server:
        """Place server ``number`` on its own devices.

        Args:
            number: Which server of the run, from 0.
            build: Makes the server's process, given the address that it should listen on. It is pickled.
            start_seconds: How long one start may take.
        """
        ...

    def broadcast_device(self) -> torch.device:
        """Return the device from which weights are broadcast to servers: a GPU that no server uses, or the CPU."""
        ...
