"""Run sglang-router in front of several servers. It sends each request to one of them, by ``--router-policy``."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import quote

import httpx

from miles.base.secrets import split_secret_words
from miles.base.threads import in_thread
from miles.config.servers.passed_on import has_flag
from miles.engine.base import ServerFailed
from miles.engine.servers.client import EngineUnavailable
from miles.engine.servers.keys import NO_KEYS, Keys, bearer
from miles.engine.servers.launch import answers
from miles.engine.servers.processes import PORT_TRIES, ChildProcess, LogFile, allow_open_files, free_port, is_taken

MODULE = "miles.engine.sglang.router_process"
START_SECONDS = 300
REQUEST_SECONDS = 30 * 24 * 3600
REGISTER_SECONDS = 60
POLL_SECONDS = 0.05

log = logging.getLogger(__name__)


class Router:
    """Run one router process. Servers are registered while they are in use."""

    name = "the router"

    def __init__(
        self, flags: tuple[str, ...], host: str, log_file: LogFile, requests: int, keys: Keys = NO_KEYS
    ) -> None:
        """Start the router. Servers are added later.

        Args:
            flags: The user's ``--router-*`` words, without the prefix.
            host: The address that it listens on.
            log_file: Where its output goes, and the limit.
            requests: The most requests in flight at once. Each takes two sockets of the router.
            keys: The keys that the router and the servers want.

        Raises:
            ValueError: If the system does not allow so many open files. The router inherits this process's limit, which
                is raised here.
            ServerFailed: If it does not start.
        """
        allow_open_files(2 * requests, f"the router, with --sglang-server-concurrency for {requests} requests in all,")
        words = ["--host", host]
        if not has_flag(flags, "--prometheus-host"):
            words += ["--prometheus-host", host]  # its default is all interfaces
        if not has_flag(flags, "--policy"):
            # The router's own default, cache_aware, looks for shared prefixes in the text of a request. Ours have token
            # ids and no text: all look alike, and all go to one server until it is 64 requests ahead of the others.
            words += ["--policy", "round_robin"]
        if not has_flag(flags, "--request-timeout-secs"):
            # By default a request fails after 30 minutes, including its wait in the server's queue: a long answer would
            # never be complete. Health checks find a server that hangs.
            words += ["--request-timeout-secs", str(REQUEST_SECONDS)]
        # Our health checks decide which servers are used, and our requests are sent again by code that counts the
        # tries. A second set of both in the router would hide failures from them.
        words += [flag for flag in ("--disable-retries", "--disable-circuit-breaker") if not has_flag(flags, flag)]
        plain, secret = split_secret_words(flags)
        self._secret_words = [*secret, *keys.router_words]
        self._keys = keys
        self._log = log_file
        self._changing = asyncio.Lock()  # held while the process or its registered servers change
        self._process = self._start(host, [*words, *plain])

    def _start(self, host: str, words: list[str]) -> ChildProcess:
        """Start the process on free ports, and again if another process has taken one before it is used.

        A restart has the same ports.
        """
        for attempt in range(1, PORT_TRIES + 1):
            port, metrics = free_port(host), free_port(host)
            self.url = f"http://{host}:{port}"
            self._words = [*words, "--port", str(port)]
            if not has_flag(words, "--prometheus-port"):  # its default is one port for all routers of a host
                self._words += ["--prometheus-port", str(metrics)]
            process = self._run()
            try:
                process.wait_until(self._is_up, START_SECONDS)
                return process
            except ServerFailed:
                if attempt == PORT_TRIES or not (is_taken(host, port) or is_taken(host, metrics)):
                    raise
        raise AssertionError("the last try returns or raises")

    def _run(self) -> ChildProcess:
        return ChildProcess(MODULE, self._words, os.environ, self._log, self._secret_words)

    @property
    def pid(self) -> int:
        """The process id of the router that runs now."""
        return self._process.pid

    def _is_up(self) -> bool:
        return answers(self.url, "/liveness")

    async def check(self, seconds: float) -> None:
        """Raise ``EngineUnavailable`` if it does not answer within ``seconds``."""
        try:
            async with self._http(seconds) as http:
                (await http.get("/liveness")).raise_for_status()
        except httpx.HTTPError as failure:
            raise EngineUnavailable(f"{self.url}/liveness: {type(failure).__name__} {failure}".rstrip()) from failure

    async def repair(
        self, servers: Callable[[], Iterable[str]], seconds: float, ends_requests: bool = False
    ) -> dict[str, Exception]:
        """Start it again at the same address if it does not answer, and register the servers that it lacks.

        The requests that a router has end with it.

        Args:
            servers: Returns the URLs that should be registered. It is called when the router is up.
            seconds: How long the router may take to answer.
            ends_requests: Start it again in any case.

        Returns:
            The servers that could not be registered, and why: these have failed too.

        Raises:
            ServerFailed: If it does not start.
        """
        failures: dict[str, Exception] = {}
        async with self._changing:
            known = None if ends_requests else await self._registered(seconds)
            if known is None:
                await in_thread(self._process.stop, 0.0)
                self._process = self._run()
                await in_thread(self._process.wait_until, self._is_up, START_SECONDS)
            for url in set(servers()) - (known or set()):
                try:
                    await self._register(url)
                except (httpx.HTTPError, TimeoutError) as failure:
                    failures[url] = failure
            if known is None:
                log.warning("the router serves again")
        return failures

    async def _registered(self, seconds: float) -> set[str] | None:
        """Return the registered servers; None, with a warning, if the router does not answer within ``seconds``."""
        try:
            async with self._http(seconds) as http:
                return set(await self._workers(http))
        except httpx.HTTPError as failure:
            log.warning("the router has failed and is restarted: %s %s", type(failure).__name__, failure)
            return None

    async def add(self, url: str) -> None:
        """Register a server; return when requests can go to it."""
        async with self._changing:
            await self._register(url)

    async def _register(self, url: str) -> None:
        async with self._http() as http:
            worker = {"url": url} if self._keys.server is None else {"url": url, "api_key": self._keys.server}
            (await http.post("/workers", json=worker)).raise_for_status()
            await self._until(http, url, present=True)

    async def remove(self, url: str) -> None:
        """Send no more requests to a server. Does nothing if it is not registered."""
        async with self._http() as http:
            workers = await self._workers(http)
            if url in workers:
                (await http.delete(f"/workers/{quote(workers[url]['id'], safe='')}")).raise_for_status()
                await self._until(http, url, present=False)

    async def _until(self, http: httpx.AsyncClient, url: str, present: bool) -> None:
        # The router answers before it has done it (202), and does not report when it is done.
        async with asyncio.timeout(REGISTER_SECONDS):
            while (await self._workers(http)).get(url, {}).get("is_healthy", False) is not present:
                await asyncio.sleep(POLL_SECONDS)

    async def _workers(self, http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
        return {worker["url"]: worker for worker in (await http.get("/workers")).raise_for_status().json()["workers"]}

    def _http(self, seconds: float = REGISTER_SECONDS) -> httpx.AsyncClient:
        # Plain HTTP; without verify=False each client reads the system's certificates, 25 ms of CPU.
        headers = bearer(self._keys.router)
        return httpx.AsyncClient(base_url=self.url, timeout=seconds, trust_env=False, verify=False, headers=headers)

    def close(self) -> None:
        """Stop the router."""
        self._process.stop(grace_seconds=1.0)
