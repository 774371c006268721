"""Check the health of an engine's servers and of their router, and replace those that fail."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from miles.base.disk_faults import WriteFailed
from miles.base.text import one_line
from miles.base.threads import cancel_all, gather_or_cancel
from miles.config.servers.flags import SglangArguments
from miles.engine.base import EngineFailed
from miles.engine.servers.client import EngineUnavailable, RequestRefused, ServerClient, refuses_connections
from miles.engine.servers.requests import see_log
from miles.engine.servers.states import ManagedServer, Servers, ServerState
from miles.engine.sglang.router import Router

START_TRIES = 3  # in a row, before a server is given up

log = logging.getLogger(__name__)

PutIntoUse = Callable[[ManagedServer], AbstractAsyncContextManager[None]]
Check = Callable[[ManagedServer], Awaitable[object]]


class Health:
    """Start the servers, check them at intervals, and replace failed ones.

    With ``--use-fault-tolerance`` a server that fails is stopped, started, given the current weights, and used again;
    meanwhile requests go to the others, or wait if there is none. A router that fails is started again. Without it, a
    server whose process has ended ends all requests, and so does a server or router that fails every check for
    ``unresponsive_seconds``: nothing else would end those that wait for it.

    Servers are checked only while they serve, since a paused server answers no check. A check that was in flight when
    its server was paused proves nothing: whatever paused the server finds out itself whether it answers.
    """

    def __init__(
        self,
        servers: Servers,
        sglang: SglangArguments,
        vocab_size: int,
        router: Router | None,
        put_into_use: PutIntoUse,
        unresponsive_seconds: float,
    ) -> None:
        """Check ``servers``.

        Args:
            servers: The servers of the engine.
            sglang: Their flags.
            vocab_size: The size of the model's vocabulary; answers to probes are checked against it.
            router: The router in front of the servers; None if there is one server.
            put_into_use: Gives a started server the weights of the others, and takes it into use after the body.
            unresponsive_seconds: How long an unresponsive server is waited for without ``--use-fault-tolerance``.
        """
        self._servers = servers
        self._interval = sglang.rollout_health_check_interval
        self._timeout = sglang.rollout_health_check_timeout
        self._vocab_size = vocab_size
        self._router = router
        self._put_into_use = put_into_use
        self._monitor = UnresponsiveServerMonitor(unresponsive_seconds)
        self._checks: dict[ManagedServer, asyncio.Task[None]] = {}  # the last one of each server
        self._router_repair: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._end_requests: Callable[[Exception], None] = lambda error: None  # before the servers have started

    async def start(self, end_requests: Callable[[Exception], None]) -> None:
        """Start all servers at the same time, then keep watching them.

        ``end_requests`` is called with the error when no answer will come any more.
        """
        await gather_or_cancel(self._start(server) for server in self._servers.all)
        self._end_requests = end_requests
        self._tasks.append(asyncio.create_task(self._watch()))
        if self._servers.restarts:
            self._tasks += [asyncio.create_task(self._keep(server)) for server in self._servers.all]

    async def close(self) -> None:
        """Stop watching, and stop the servers and the router."""
        tasks = list(self._tasks)
        if self._router_repair is not None:
            tasks.append(self._router_repair)
        await cancel_all(tasks)
        for server in self._servers.all:
            server.enter(ServerState.CLOSED)
        await asyncio.gather(*(server.process.stop() for server in self._servers.all))
        await asyncio.gather(*(server.disconnect() for server in self._servers.all))
        if self._router is not None:
            self._router.close()

    # Checks

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                if not self._servers.all_serving:
                    self._monitor.reset()
                elif self._servers.restarts:
                    await self._check_all(self._check)
                else:
                    await self._monitor.check(self._checks_by_name())
            except Exception as failure:  # whatever it is: nobody would watch any more
                self._end_requests(failure)
                return

    async def check_after_failure(self) -> None:
        """After a failed request, find the servers that do not work; if none is restarted, those that have ended."""
        if self._servers.restarts:
            await self._check_all(self._probe)
            return
        try:
            await asyncio.gather(*(self._check_process(server) for server in self._servers.in_use))
        except EngineFailed as failure:
            self._end_requests(failure)

    async def _check_process(self, server: ManagedServer) -> None:
        """Raise ``EngineFailed`` if the process of a server that is not restarted has ended."""
        if how := await server.process.ending():
            raise EngineFailed(f"{server.name}: its process ended {how}; {see_log(self._servers.restarts)}")

    async def _check_all(self, check: Check) -> None:
        """Have each server in use prove that it works, and take those out that do not.

        All of them, because nobody knows which one the router chose; and the router first. Callers at the same time
        share the running check of a server and the repair of the router. Raises ``ServerFailed`` if the router does not
        start again.
        """
        await self._repair_router()
        await asyncio.gather(*(self._shared_check(server, check) for server in self._servers.in_use))

    async def _shared_check(self, server: ManagedServer, check: Check) -> None:
        if not server.in_use:
            return
        if server not in self._checks or self._checks[server].done():
            self._checks[server] = asyncio.create_task(self._check_or_fail(server, check))
        await asyncio.shield(self._checks[server])

    async def _check_or_fail(self, server: ManagedServer, check: Check) -> None:
        try:
            await check(server)
        except (EngineUnavailable, RequestRefused) as failure:
            server.fail(await server.why(failure))

    def _checks_by_name(self) -> dict[str, Coroutine[Any, Any, object]]:
        checks: dict[str, Coroutine[Any, Any, object]] = {
            server.name: self._check_unreplaced(server) for server in self._servers.in_use
        }
        if self._router is not None:
            checks[self._router.name] = self._router.check(self._timeout)
        return checks

    async def _check(self, server: ManagedServer) -> bool:
        """Ask for the server's own health check, which a busy server passes; ``_ask``."""
        return await self._ask(server, lambda client: client.check_health(self._servers.version))

    async def _ask(self, server: ManagedServer, ask: Callable[[ServerClient], Awaitable[None]]) -> bool:
        """Ask a server that serves.

        Returns:
            True if it passed; False if it could not be checked, because it does not serve or stopped serving meanwhile.

        Raises:
            EngineUnavailable: If it failed.
        """
        if server.state is not ServerState.SERVING:
            return False
        changes = server.changes
        try:
            with self._servers.checking():
                await ask(server.client)
            return True
        except EngineUnavailable:
            if server.changes == changes:
                raise
            return False

    async def _check_unreplaced(self, server: ManagedServer) -> bool:
        """Check a server that is not restarted; ``_check``. Raises ``EngineFailed`` too."""
        try:
            return await self._check(server)
        except EngineUnavailable:
            await self._check_process(server)
            raise

    async def _probe(self, server: ManagedServer) -> None:
        """Generate one token, and check that the answer is sound. A server that is only busy passes.

        This finds a fault that the server's own health check does not: answers that are no generations.
        """
        try:
            await self._ask(server, lambda client: client.probe(self._servers.version, self._vocab_size))
        except EngineUnavailable as failure:
            if not isinstance(failure.__cause__, TimeoutError):
                raise
            await self._check(server)  # a busy server answers this one out of turn

    # Replacement

    async def _keep(self, server: ManagedServer) -> None:
        """Replace ``server`` each time it fails. A full disk of its host ends all requests: another try has no room."""
        while True:
            await self._servers.until_failed(server)
            try:
                await self._replace(server)
            except WriteFailed as failure:
                self._end_requests(WriteFailed(f"{server.name}: {failure}"))
                server.enter(ServerState.LOST)

    async def _replace(self, server: ManagedServer) -> None:
        for attempt in range(1, START_TRIES + 1):
            try:
                if self._router is not None:
                    await self._repair_router()
                    await self._router.remove(server.client.url)
                await server.process.stop()
                await self._end_routed_requests(server)
                server.enter(ServerState.STARTING)
                await self._start(server)
                log.warning("%s serves again", server.name)
                return
            except Exception as failure:
                server.enter(ServerState.FAILED)
                log.warning("%s: start %d of %d failed: %s", server.name, attempt, START_TRIES, failure)
                if isinstance(failure, WriteFailed):
                    raise
                server.lost_because = one_line(str(failure), 300)
        server.enter(ServerState.LOST)

    async def _end_routed_requests(self, server: ManagedServer) -> None:
        """End the requests that the router has sent to a server that is out of use, if nothing else ends them.

        Those to a process that is gone have ended with it. One that hangs may not be ours to stop, or be on a host that
        was lost. Then all requests of the router end, and are sent again.
        """
        if self._router is None or await refuses_connections(server.client.url, self._timeout):
            return
        log.warning("%s keeps its requests; the router is restarted, which sends all requests again", server.name)
        await self._repair(self._router, ends_requests=True)

    async def _start(self, server: ManagedServer) -> None:
        url = await server.process.start()
        await server.connect(self._servers.connect(url))
        async with self._put_into_use(server):
            if self._router is not None:
                await self._router.add(url)

    async def _repair_router(self) -> None:
        """Start the router again if it does not answer, and register the servers that it lacks."""
        if self._router is None:
            return
        if self._router_repair is None or self._router_repair.done():
            self._router_repair = asyncio.create_task(self._repair(self._router))
        await asyncio.shield(self._router_repair)  # cancelling one request must not leave a router without servers

    async def _repair(self, router: Router, ends_requests: bool = False) -> None:
        def urls() -> list[str]:
            return [server.client.url for server in self._servers.in_use]

        failures = await router.repair(urls, self._timeout, ends_requests)
        for server in self._servers.in_use:
            if failure := failures.get(server.client.url):
                server.fail(failure)


class UnresponsiveServerMonitor:
    """Measure how long each server that is not restarted, and the router, has passed no health check."""

    def __init__(self, seconds: float) -> None:
        """Allow ``seconds`` without a passed check."""
        self._seconds = seconds
        self._since: dict[str, float] = {}  # by name; time.monotonic()

    def reset(self) -> None:
        """Forget all failed checks: nothing is checked for a while, and that time must not count."""
        self._since.clear()

    async def check(self, checks: Mapping[str, Awaitable[object]]) -> None:
        """Await the check of each server. A result of ``False`` means that it could not be checked.

        Warns when a server begins to fail, and when it passes again.

        Raises:
            EngineFailed: If a server has failed for too long, or its process has ended.
        """
        began = time.monotonic()
        results = await asyncio.gather(*checks.values(), return_exceptions=True)
        for name, result in zip(checks, results, strict=True):
            if isinstance(result, EngineUnavailable):
                self._report(name, began, result)
            elif isinstance(result, BaseException) and not isinstance(result, RequestRefused):  # a refusal is an answer
                raise result
            elif self._since.pop(name, None) is not None and result is not False:
                log.warning("%s passes its health check again", name)

    def _report(self, name: str, began: float, failure: EngineUnavailable) -> None:
        if name not in self._since:
            self._since[name] = began
            log.warning(
                "%s does not pass its health check (%s); requests to it may get no answer. Unless it recovers, the run "
                "stops in %g s (--worker-timeout); with --use-fault-tolerance it would be restarted",
                name,
                failure,
                self._seconds,
            )
            return
        silent = time.monotonic() - self._since[name]
        if silent > self._seconds:
            raise EngineFailed(
                f"{name} has passed no health check for {silent:.0f} s (--worker-timeout), at last: "
                f"{failure}; its log file may say why; with --use-fault-tolerance it would be restarted"
            ) from failure
