"""Which servers may be used now: one that fails is taken out and brought up again. A router spreads requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from miles.engine.sglang.router import Router
from miles.engine.sglang.sglang_client import EngineUnavailable, RequestRefused, SglangClient

T = TypeVar("T")

START_TRIES = 3  # in a row, before an engine is given up

log = logging.getLogger(__name__)


class Server(Protocol):
    """One server, wherever it runs. ``name`` is how messages call it."""

    name: str

    async def start(self) -> str:
        """Start it where it does not run, wait until it serves, and return its URL."""
        ...

    async def stop(self) -> None:
        """End it, whatever state it is in."""
        ...


class Member:
    """One server as the pool knows it. ``client`` is of the process that runs now; each start has another."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.client: SglangClient | None = None
        self.serving = False
        self.asked: set[asyncio.Future[Any]] = set()  # in flight
        self.recovery: asyncio.Task[None] | None = None
        self.probe: asyncio.Task[None] | None = None

    @property
    def connected(self) -> SglangClient:
        """The client, where a server has been started."""
        assert self.client is not None, f"{self.server.name} has not been started"
        return self.client

    async def answer(self, request: Awaitable[T]) -> T:
        """The answer to ``request``. Raises ``EngineUnavailable`` when the member is taken out before it comes."""
        asked = asyncio.ensure_future(request)
        self.asked.add(asked)
        try:
            await asyncio.wait([asked])
            if asked.cancelled():
                raise EngineUnavailable(f"{self.server.name} was taken out with the request in flight")
            return asked.result()
        finally:
            self.asked.discard(asked)
            asked.cancel()

    def drop_all(self) -> None:
        """Let nobody wait for an answer of it any more."""
        for asked in self.asked:
            asked.cancel()


class EnginePool:
    """The servers of a run.

    ``connect`` makes the client of a URL; ``bring_up`` gives a started server the current weights, and keeps others
    from coming while its body runs. With ``restart`` a member that fails is stopped, started, brought up and taken in
    again, while requests go to the others, or wait when there is none, and a router that fails is started again;
    without it a failure is the caller's. Two members or more stand behind a ``router``, which chooses one for each
    request, and knows the members that serve and no others.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        connect: Callable[[str], SglangClient],
        bring_up: Callable[[Member], AbstractAsyncContextManager[None]],
        router: Router | None,
        restart: bool,
        router_seconds: float = 30.0,
    ) -> None:
        assert router is not None or len(servers) == 1, f"{len(servers)} servers need a router in front of them"
        self.members = [Member(server) for server in servers]
        self._connect = connect
        self._bring_up = bring_up
        self._router = router
        self._router_client = connect(router.url) if router is not None else None
        self._restart = restart
        self._router_seconds = router_seconds  # without an answer of the router are too many
        self._mending: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def open(self) -> None:
        """Start all servers, at the same time."""
        await asyncio.gather(*(self._start(member) for member in self.members))

    @property
    def serving(self) -> list[Member]:
        """Members that may be used now."""
        return [member for member in self.members if member.serving]

    async def run(self, call: Callable[[SglangClient], Awaitable[T]]) -> T:
        """Have a server do ``call``; waits while every server is being restarted. Raises ``EngineUnavailable``."""
        await self._until_one_serves()
        if self._router_client is not None:
            return await call(self._router_client)
        [only] = self.members
        return await only.answer(call(only.connected))

    async def _until_one_serves(self) -> None:
        async with self._changed:
            while not self.serving:
                if all(member.recovery is None or member.recovery.done() for member in self.members):
                    names = ", ".join(member.server.name for member in self.members)
                    raise RuntimeError(f"no engine is left ({names}); their log files say why")
                await self._changed.wait()

    async def suspect_all(self, probe: Callable[[SglangClient], Awaitable[object]]) -> None:
        """Have each member that serves prove with ``probe`` that it works; take out those that do not.

        All of them, because nobody knows which one the router had chosen, and the router as well: one that does not
        answer is started again. Does nothing in a pool that does not restart. Suspicions at a time share the probe of a
        member and that of the router. Raises ``ServerFailed`` where the router does not come up again.
        """
        if self._restart:
            await self._mend_router()
            await asyncio.gather(*(self._check(member, probe) for member in self.serving))

    async def _mend_router(self) -> None:
        if self._router is None:
            return
        if self._mending is None or self._mending.done():
            self._mending = asyncio.ensure_future(self._mend(self._router))
        await asyncio.shield(self._mending)  # a request that is given up meanwhile leaves no router without engines

    async def _mend(self, router: Router) -> None:
        failures = await router.mend(lambda: [member.connected.url for member in self.serving], self._router_seconds)
        for member in self.serving:
            if failure := failures.get(member.connected.url):
                await self.take_out(member, failure)

    async def _check(self, member: Member, probe: Callable[[SglangClient], Awaitable[object]]) -> None:
        if not member.serving:
            return
        if member.probe is None or member.probe.done():
            member.probe = asyncio.ensure_future(self._prove(member, probe))
        await asyncio.shield(member.probe)

    async def _prove(self, member: Member, probe: Callable[[SglangClient], Awaitable[object]]) -> None:
        try:
            await probe(member.connected)
        except (EngineUnavailable, RequestRefused) as failure:
            await self.take_out(member, failure)

    async def take_out(self, member: Member, reason: Exception) -> None:
        """Stop using ``member`` at once, and bring it up again in the background."""
        if not member.serving:
            return
        member.serving = False
        member.drop_all()
        log.warning("%s has failed and is restarted: %s", member.server.name, reason)
        member.recovery = asyncio.create_task(self._recover(member))

    async def _recover(self, member: Member) -> None:
        try:
            for attempt in range(1, START_TRIES + 1):
                try:
                    if self._router is not None:
                        await self._mend_router()
                        await self._router.remove(member.connected.url)
                    await member.server.stop()
                    await self._start(member)
                    log.warning("%s serves again", member.server.name)
                    return
                except Exception as failure:
                    log.warning("%s: start %d of %d failed: %s", member.server.name, attempt, START_TRIES, failure)
        finally:
            async with self._changed:
                self._changed.notify_all()

    async def _start(self, member: Member) -> None:
        url = await member.server.start()
        if member.client is not None:
            await member.client.close()
        member.client = self._connect(url)
        async with self._bring_up(member):
            if self._router is not None:
                await self._router.add(url)
            async with self._changed:
                member.serving = True
                self._changed.notify_all()

    async def close(self) -> None:
        """Stop everything."""
        if self._mending is not None:
            self._mending.cancel()
        for member in self.members:
            member.serving = False
            if member.recovery is not None:
                member.recovery.cancel()
        await asyncio.gather(*(member.server.stop() for member in self.members))
        clients = [self._router_client, *(member.client for member in self.members)]
        await asyncio.gather(*(client.close() for client in clients if client is not None))
        if self._router is not None:
            self._router.close()
