"""The servers of an engine: the state of each, and what all of them should hold.

``ServerState`` is the only record of the requests that a server may get. The three parts of the engine share it:
requests (requests.py), weight updates (weight_updates.py), health and replacement (health.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from miles.base.disk_faults import WriteFailed
from miles.engine.base import EngineFailed, Server
from miles.engine.servers.client import ServerClient
from miles.engine.servers.requests import SeenServer, SeenServers, UsedServers, see_log

log = logging.getLogger(__name__)


class ServerState(Enum):
    """The state of one server. Requests go to servers in use; only a serving one is checked.

    ::

        STARTING ─────────────> in use: SERVING, PAUSED, UPDATING, RELEASED
          ^   │    joins          │
          │   │ a start fails     │ a check, an update or a control call fails
          │   v                   v
          └─ FAILED <─────────────┘
               │
               └─────> LOST: START_TRIES starts in a row have failed          CLOSED <── from every state

    While a server is in use::

        SERVING, PAUSED ── an update ──> UPDATING ───> SERVING; PAUSED if the update failed
        SERVING, PAUSED ── release ────> RELEASED ───> UPDATING, which takes the memory back

    A starting server joins as the others are: SERVING, or RELEASED if memory is released.
    An error that ends an update leaves servers PAUSED, or RELEASED if they have not taken their memory back.
    """

    STARTING = "starting"  # its process starts, and then gets the current weights
    SERVING = "serving"
    PAUSED = "paused"  # after an update that failed: keeps its requests and generates nothing
    UPDATING = "updating"  # paused, and takes new weights
    RELEASED = "released"  # has released its GPU memory, and has no requests
    FAILED = "failed"  # taken out of use; health.py starts it again
    LOST = "lost"
    CLOSED = "closed"


_S = ServerState
IN_USE = frozenset({_S.SERVING, _S.PAUSED, _S.UPDATING, _S.RELEASED})
NEXT_STATES = {
    _S.STARTING: {_S.SERVING, _S.RELEASED, _S.FAILED, _S.CLOSED},
    _S.SERVING: {_S.UPDATING, _S.RELEASED, _S.FAILED, _S.CLOSED},
    _S.PAUSED: {_S.UPDATING, _S.RELEASED, _S.FAILED, _S.CLOSED},
    _S.UPDATING: {_S.SERVING, _S.PAUSED, _S.RELEASED, _S.FAILED, _S.CLOSED},
    _S.RELEASED: {_S.UPDATING, _S.FAILED, _S.CLOSED},
    _S.FAILED: {_S.STARTING, _S.LOST, _S.CLOSED},
    _S.LOST: {_S.CLOSED},
    _S.CLOSED: set[ServerState](),
}


class ManagedServer:
    """One server: how to start it, the client of the process that runs now, its state, and its direct requests."""

    def __init__(self, process: Server, changed: Callable[[], None]) -> None:
        """Manage ``process``, and call ``changed`` after each change of state."""
        self.process = process
        self.name = process.name
        self.state = ServerState.STARTING
        self.changes = 0  # how often the state has changed
        self.starts = 0  # how many processes have been connected to
        self.lost_because = ""  # why its last start failed
        self.requests: set[asyncio.Task[Any]] = set()  # in flight, sent to it without a router
        self._changed = changed
        self._client: ServerClient | None = None

    @property
    def in_use(self) -> bool:
        """Whether it counts as one of the engine's servers now."""
        return self.state in IN_USE

    @property
    def client(self) -> ServerClient:
        """The client of the process that runs now. Each start has another one."""
        assert self._client is not None, f"{self.name} has not been started"
        return self._client

    async def connect(self, client: ServerClient) -> None:
        """Use ``client`` from now on."""
        await self.disconnect()
        self._client = client
        self.starts += 1

    async def disconnect(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()

    def enter(self, state: ServerState) -> None:
        """Change the state. Does nothing if it is ``state`` already."""
        if state is not self.state:
            assert state in NEXT_STATES[self.state], f"{self.name}: {self.state.value} cannot become {state.value}"
            self.state = state
            self.changes += 1
            self._changed()

    async def why(self, failure: Exception) -> str:
        """Return why it does not answer: what has ended its process, or ``failure`` if it runs."""
        how = await self.process.ending()
        return f"its process ended {how}" if how else str(failure)

    def fail(self, reason: object) -> None:
        """Stop using it at once, and end the wait of its direct requests. ``Health`` starts it again."""
        if self.in_use:
            log.warning("%s has failed and is restarted: %s", self.name, reason)
            self.enter(ServerState.FAILED)
            for request in self.requests:
                request.cancel()


Failures = list[tuple[ManagedServer, Exception]]


class Servers(UsedServers):
    """All servers of an engine, and what every one of them should hold.

    Attributes:
        all: The servers, in whatever state.
        memory_released: Whether the servers have released their memory, until the next update.
        updating: Held while weights or memory change, and while a starting server joins. A server that joins during an
            update would miss it.
    """

    def __init__(self, processes: Sequence[Server], connect: Callable[[str], ServerClient], restarts: bool) -> None:
        """Manage ``processes``; ``connect`` makes the client for a URL."""
        super().__init__(restarts)
        self.all = [ManagedServer(process, self._wake) for process in processes]
        self.connect = connect
        self.memory_released = False
        self.updating = asyncio.Lock()
        self._show: Callable[[SeenServers], Awaitable[None]] | None = None
        self._showing: set[asyncio.Future[None]] = set()
        self._checks = 0
        self._unchecked = asyncio.Event()
        self._unchecked.set()

    @property
    def in_use(self) -> list[ManagedServer]:
        """The servers that are used now."""
        return [server for server in self.all if server.in_use]

    @property
    def all_serving(self) -> bool:
        """Whether every server in use serves, so that health checks get an answer."""
        return all(server.state is ServerState.SERVING for server in self.in_use)

    def _gone(self) -> Exception | None:
        is_over = all(server.state in (ServerState.LOST, ServerState.CLOSED) for server in self.all)
        if self._end is not None or not is_over:
            return self._end
        reasons = (f"{server.name}: {server.lost_because}".removesuffix(": ") for server in self.all)
        return EngineFailed(f"no engine is left ({', '.join(reasons)}); their log files say more")

    async def until_failed(self, server: ManagedServer) -> None:
        """Wait until ``server`` has failed."""
        while server.state is not ServerState.FAILED:
            await self._changed.wait()

    def _wake(self) -> None:
        super()._wake()
        self._start_showing()

    def show_to(self, show: Callable[[SeenServers], Awaitable[None]]) -> None:
        """Call ``show`` with what other processes must know, after each change; it is in order from its call on."""
        self._show = show

    def _start_showing(self) -> asyncio.Future[None] | None:
        if self._show is None:
            return None
        in_use = tuple(SeenServer(server.name, server.starts, server.client.url) for server in self.in_use)
        seen = SeenServers(self.version, self.oldest, in_use, self._gone())
        task = asyncio.ensure_future(self._show(seen))
        self._showing.add(task)
        task.add_done_callback(self._showing.discard)
        return task

    async def wait_until_known(self) -> None:
        """Return when other processes, if there are any, know the servers and the version at present."""
        if (task := self._start_showing()) is not None:
            await task

    def end(self, error: Exception) -> None:
        """Tell those who wait, and other processes, that no answer will come any more."""
        self._end = error
        self._wake()

    async def call(
        self, servers: Sequence[ManagedServer], make: Callable[[ServerClient], Awaitable[object]]
    ) -> Failures:
        """Make the same control call to ``servers`` at once; return the failures."""
        results = await asyncio.gather(*(make(server.client) for server in servers), return_exceptions=True)
        return [(server, r) for server, r in zip(servers, results, strict=True) if isinstance(r, Exception)]

    async def call_all(self, make: Callable[[ServerClient], Awaitable[object]]) -> None:
        """Make the same control call to all servers in use, and handle the failures."""
        await self.handle(await self.call(self.in_use, make))

    async def handle(self, failures: Failures, what: str = "") -> None:
        """Take failed servers out of use if they are restarted; otherwise raise the first failure.

        A full disk is raised in any case, as a restart makes no room.
        """
        for server, failure in failures:
            if isinstance(failure, WriteFailed):
                raise WriteFailed(f"{server.name}: {failure}") from failure
            if not self.restarts:
                raise EngineFailed(f"{server.name}{what}: {await server.why(failure)}; {see_log(False)}") from failure
            server.fail(failure)

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Count a health check in flight: an idle server has a request while it is checked."""
        self._checks += 1
        self._unchecked.clear()
        try:
            yield
        finally:
            self._checks -= 1
            if not self._checks:
                self._unchecked.set()

    async def until_unchecked(self) -> None:
        """Wait until no health check is in flight."""
        await self._unchecked.wait()
