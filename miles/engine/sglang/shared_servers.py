"""Send requests to the servers of an engine from another process.

::

    the engine's process                                another process
    Servers ── SeenServers, at each change ───────────> SharedServers ── Requests (requests.py) ──> the servers
    Health <── "a request has failed" ────────────────────┘

The other process checks, updates and restarts nothing. It knows the servers by the newest ``SeenServers``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles.engine.base import Generation, GenerationRequest
from miles.engine.sglang.client import SglangClient
from miles.engine.sglang.keys import Keys
from miles.engine.sglang.processes import allow_open_files
from miles.engine.sglang.requests import Requests


@dataclass(frozen=True)
class SeenServer:
    """A server in use. ``start`` counts its processes: another one has other requests, be it at the same address."""

    name: str
    start: int
    url: str


@dataclass(frozen=True)
class SeenServers:
    """What those must know of the servers who send requests.

    Attributes:
        version: Of the weights that every server in use should have, as in ``Servers``.
        oldest: The version before it while an update is in progress.
        in_use: The servers that requests may go to.
        end: Why no answer will come any more; None if answers may come.
    """

    version: int | None
    oldest: int | None
    in_use: tuple[SeenServer, ...]
    end: Exception | None


class SharedServer:
    """A server in use, with a client of this process; ``requests.UsedServer``."""

    def __init__(self, name: str, client: SglangClient) -> None:
        self.name = name
        self.client = client
        self.requests: set[asyncio.Task[Any]] = set()


class SharedServers:
    """The servers by the newest ``SeenServers``; ``requests.UsedServers``."""

    def __init__(self, restarts: bool, connect: Callable[[str], SglangClient]) -> None:
        """Know no server yet. ``connect`` makes the client for a URL; ``restarts`` is as in ``Servers``."""
        self.restarts = restarts
        self.version: int | None = None
        self.oldest: int | None = None
        self._connect = connect
        self._by_seen: dict[SeenServer, SharedServer] = {}
        self._end: Exception | None = None
        self._changed = asyncio.Event()  # replaced at each change, so that it wakes those who wait now
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def in_use(self) -> list[SharedServer]:
        """The servers that are used now."""
        return list(self._by_seen.values())

    def show(self, seen: SeenServers) -> None:
        """Know ``seen`` from now on, and end the wait of requests to servers that are out of use."""
        self.version, self.oldest, self._end = seen.version, seen.oldest, seen.end
        for gone in self._by_seen.keys() - set(seen.in_use):
            server = self._by_seen.pop(gone)
            for request in server.requests:
                request.cancel()
            closing = asyncio.ensure_future(server.client.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for found in seen.in_use:
            if found not in self._by_seen:
                self._by_seen[found] = SharedServer(found.name, self._connect(found.url))
        self._changed.set()
        self._changed = asyncio.Event()

    async def until_one_in_use(self) -> None:
        """Wait until a server is used. Raises what the engine has said if no server can come back."""
        while not self._by_seen:
            if self._end is not None:
                raise self._end
            await self._changed.wait()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*self._closing, *(server.client.close() for server in self.in_use))


class SglangSender:
    """Send requests as the engine does; ``miles.engine.base.RequestSender``."""

    def __init__(self, servers: SharedServers, requests: Requests) -> None:
        self._servers = servers
        self._requests = requests
        self._end: Exception | None = None

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, in order; raises what ``SglangEngine.generate`` raises."""
        return await self._requests.generate(request)

    def show(self, state: SeenServers) -> None:
        """Know the servers as the engine shows them."""
        self._servers.show(state)
        if state.end is not None and self._end is None:
            self._end = state.end
            self._requests.end_all(state.end)

    async def aborted(self) -> None:
        """Send nothing of what was asked for before, and return when what was sent has ended."""
        await self._requests.aborted()

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and not answered."""
        return self._requests.in_flight

    async def close(self) -> None:
        """Close the connections."""
        await self._requests.close()
        await self._servers.close()


@dataclass(frozen=True)
class SenderConfig:
    """What a process needs to send requests; ``miles.engine.base.SenderConfig``.

    Attributes:
        requests: At a time, of all processes together.
        vocab_size: The size of the model's vocabulary.
        eos_ids: The model's own stop tokens.
        keeps_cache: Whether an update of the weights leaves what the old ones have computed.
        restarts: Whether failed servers are started again.
        router: The address that requests go to; None if there is one server.
        keys: The keys of router and servers.
        experts_shape: Layers and k of a model with experts.
        seconds: The time limit of control calls.
        why: The flag that asks for so many requests, and its value.
    """

    requests: int
    vocab_size: int
    eos_ids: frozenset[int]
    keeps_cache: bool
    restarts: bool
    router: str | None
    keys: Keys
    experts_shape: tuple[int, int] | None
    seconds: float
    why: str

    def open(self, requests: int, check_servers: Callable[[], Awaitable[None]]) -> SglangSender:
        """Return what sends up to ``requests`` at a time, over as many connections, and keeps these.

        Raises:
            ValueError: The system allows too few open files.
        """
        allow_open_files(requests, self.why)
        connect = partial(SglangClient, connections=requests, seconds=self.seconds)
        servers = SharedServers(self.restarts, partial(connect, key=self.keys.server))
        router = None if self.router is None else connect(self.router, key=self.keys.router)
        asked = Requests(
            servers,
            requests,
            self.vocab_size,
            self.eos_ids,
            self.keeps_cache,
            router,
            check_servers,
            self.experts_shape,
        )
        return SglangSender(servers, asked)
