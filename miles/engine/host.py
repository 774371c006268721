"""The protocol by which a run offers devices, and places for server processes, to its engine.

The cluster implements ``EngineHost``; engines never see Ray. ``LocalHost`` implements it in one process, without Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from miles.base.threads import in_thread

if TYPE_CHECKING:  # server processes import this module before they start, and torch takes seconds
    import torch

    from miles.engine.weight_sync.local_copy import CopySource, WeightFolder


class ServerFailed(RuntimeError):
    """A server process ended, or hung, before it served."""


class ServerProcess(Protocol):
    """Start and stop one server, or its part of one node, on the host where this object is."""

    def meeting_address(self) -> str:
        """Return an address of this host, HOST:PORT, at which the parts of a server can meet."""
        ...

    def start(self, meeting: str | None = None) -> str:
        """Start the server, wait until it serves, and return its URL. Raises ``ServerFailed`` if it does not.

        ``meeting`` is the address at which it meets the parts on other nodes, if it has any.
        """
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

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring the copy of the weights on the server's host up to date, and return it.

        Raises ``DeltaRefused`` if the host needs all weights, and ``ServerFailed`` if it does not answer.
        """
        ...


class ServerPart(Server, Protocol):
    """The process of one node of a server, seen from afar: a whole server, if it has one node."""

    async def meeting_address(self) -> str:
        """Return an address of its host; ``ServerProcess.meeting_address``."""
        ...

    async def start(self, meeting: str | None = None) -> str:
        """Start the process if it does not run; ``ServerProcess.start``."""
        ...


class EngineHost(Protocol):
    """Place an engine. ``device`` (cpu or cuda) is the one that the run computes on."""

    device: str

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> ServerPart:
        """Place the part of server ``number`` that is on its node ``node``, on devices of its own.

        Args:
            number: Which server of the run, from 0.
            build: Makes the server's process, given the address that it should listen on. It is pickled.
            start_seconds: How long one start may take.
            node: Which of the nodes that the server spans, from 0.
        """
        ...

    def broadcast_device(self) -> torch.device:
        """Return the device from which weights are broadcast to servers: a GPU that no server uses, or the CPU."""
        ...


class LocalServer:
    """Start and stop a server from the event loop."""

    def __init__(self, number: int, process: ServerProcess) -> None:
        self.name = f"engine {number}"
        self._process = process

    async def meeting_address(self) -> str:
        """Return an address of this machine; ``ServerPart.meeting_address``."""
        return self._process.meeting_address()

    async def start(self, meeting: str | None = None) -> str:
        """Start the server in a thread, since that takes long; ``ServerPart.start``."""
        return await in_thread(self._process.start, meeting)

    async def stop(self) -> None:
        """Stop it; ``Server.stop``."""
        await in_thread(self._process.stop)

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Update this machine's copy in a thread; ``Server.update_copy``."""
        return await in_thread(source.update_copy)


class LocalHost:
    """Place servers on this machine. All of them see the same devices.

    Args:
        device: cpu or cuda.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def place_server(
        self, number: int, build: Callable[[str], ServerProcess], start_seconds: float, node: int = 0
    ) -> LocalServer:
        """Place server ``number``; ``EngineHost.place_server``. The process itself bounds its start."""
        return LocalServer(number, build("127.0.0.1"))

    def broadcast_device(self) -> torch.device:
        """Return the CPU: no weights are sent."""
        import torch

        return torch.device("cpu")
