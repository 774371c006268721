"""Generate with servers: send requests, send them again after a failure, check the answers, and end them."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from miles.base.threads import gather_or_cancel, in_thread
from miles.engine.base import EngineFailed, Generation, GenerationRequest, SamplingParams
from miles.engine.servers.client import EngineUnavailable, ServerClient
from miles.engine.servers.keys import Keys
from miles.engine.servers.processes import allow_open_files

REQUEST_TRIES = 8
BACK_OFF_SECONDS = 0.25  # doubled from try to try
MAX_BACK_OFF_SECONDS = 5.0


class UsedServer(Protocol):
    """A server that requests may go to. Its owner cancels its ``requests`` when it takes it out of use."""

    name: str
    requests: set[asyncio.Task[Any]]  # in flight, sent to it without a router

    @property
    def client(self) -> ServerClient:
        """The client of the process that runs now."""


class UsedServers(ABC):
    """The servers as a sender of requests sees them: the engine itself, or another process.

    Attributes:
        restarts: Whether failed servers are started again (``--use-fault-tolerance``).
        version: The version of the weights that every server in use should have; None before the first update, when
            external servers may hold any weights.
        oldest: The version before it while an update is in progress: answers may have tokens of both.
    """

    def __init__(self, restarts: bool) -> None:
        self.restarts = restarts
        self.version: int | None = None
        self.oldest: int | None = None
        self._end: Exception | None = None
        self._changed = asyncio.Event()  # replaced at each change, so that it wakes those who wait now

    @property
    @abstractmethod
    def in_use(self) -> Sequence[UsedServer]:
        """The servers that are used now."""

    def _gone(self) -> Exception | None:
        """Return why no server can come back, if that is so."""
        return self._end

    async def until_one_in_use(self) -> None:
        """Wait while all servers are being restarted. Raises the reason if none can come back."""
        while not self.in_use:
            if gone := self._gone():
                raise gone
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Requests:
    """Answer every request exactly once: with a valid generation, or with an error.

    A request is sent again, to whatever server the router chooses, if its server does not answer, answers with HTTP
    5xx, or answers with something that is no generation or that other weights generated. A refusal (HTTP 4xx) is an
    error at once.
    """

    def __init__(
        self,
        servers: UsedServers,
        config: ServersSenderConfig,
        most: int,
        after_failure: Callable[[], Awaitable[None]],
    ) -> None:
        """Send requests through the router, or to the server that has the fewest of them.

        Args:
            servers: The servers of the engine.
            config: What is the same in all processes that send requests.
            most: Requests at once; further ones wait here.
            after_failure: Called after each failed try: finds the servers that do not work, has them restarted, and
                waits for an update of the weights in progress, which finds failed servers itself.
        """
        self._servers = servers
        self._config = config
        self._router = None if config.router is None else config.connect(config.router, most, config.keys.router)
        self._after_failure = after_failure
        self._slots = asyncio.Semaphore(most)
        self._sent: set[asyncio.Task[Generation]] = set()  # in flight
        self._aborts = 0
        self._end: Exception | None = None  # why all requests have ended

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, in order; ``ServersEngine.generate`` states more."""
        request.check(self._config.vocab_size)
        aborts = self._aborts
        if request.images is not None:
            from miles.models.images import encoded, has_other_media  # a run with text reads none of it

            images = request.images
            if await in_thread(has_other_media, images, request.prompt_ids):
                # Servers find images by their placeholders. The model has sampled one, so nothing can follow it.
                return [Generation([], [], "length", self._version) for _ in request.seeds]
            request = replace(request, images=await in_thread(encoded, images))
        return await gather_or_cancel(self._generate_one(request, seed, aborts) for seed in request.seeds)

    async def _generate_one(self, request: GenerationRequest, seed: int, aborts: int) -> Generation:
        async with self._slots:
            for attempt in range(1, REQUEST_TRIES + 1):
                try:
                    return await self._try(request, seed, aborts)
                except EngineUnavailable as failure:
                    if attempt == REQUEST_TRIES:
                        raise EngineFailed(
                            f"a request failed {REQUEST_TRIES} times, at last with: {failure}; "
                            f"{see_log(self._servers.restarts)}"
                        ) from failure
                    await self._after_failure()
                    await asyncio.sleep(min(BACK_OFF_SECONDS * 2 ** (attempt - 1), MAX_BACK_OFF_SECONDS))
        raise AssertionError("unreachable")

    async def _try(self, request: GenerationRequest, seed: int, aborts: int) -> Generation:
        """Send the request once. ``aborts`` is the number of aborts when it was made."""
        sent_under = self._servers.oldest or 0
        await self._servers.until_one_in_use()
        if self._end is not None:
            raise self._end
        if self._aborts != aborts:  # aborted before it was sent
            return Generation([], [], "abort", self._version)
        generation = await self._send(request, seed)
        low, high = sorted((sent_under, self._version))
        versions = {generation.weight_version, *(version for version, _ in generation.earlier_versions)}
        if self._servers.version is not None and not low <= min(versions) <= max(versions) <= high:
            raise EngineUnavailable(f"an answer by weights {sorted(versions)} instead of {self._version}")
        return self._with_true_end(generation, request.sampling)

    @property
    def _version(self) -> int:
        return self._servers.version or 0  # servers of our own start with version 0

    async def _send(self, request: GenerationRequest, seed: int) -> Generation:
        """Send to the router or a server, and wait for the answer, an abort, or the server's failure.

        sglang-router 0.3.2 drops the fields of a request that it does not know. Requests with such a field go to the
        server that has the fewest of them.
        """
        # Unless the cache is flushed with each update, the results of the old weights must not be found again.
        key = str(self._version) if self._config.keeps_cache else None
        sampling = request.sampling
        unknown = sampling.returns_support or sampling.returns_experts or sampling.stop_texts or request.images
        if self._router is not None and not unknown:
            client, name, tracked_by = self._router, "the router", [self._sent]
        else:
            server = min(self._servers.in_use, key=lambda server: len(server.requests))
            client, name, tracked_by = server.client, server.name, [self._sent, server.requests]
        # Of the model's own stop tokens, a server knows only the ones in its configuration.
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *sorted(self._config.eos_ids))))
        request = replace(request, sampling=replace(sampling, stop_token_ids=stops))
        work = client.generate(request, seed, self._config.vocab_size, key, self._config.experts_shape)
        task = asyncio.create_task(work)
        for tasks in tracked_by:
            tasks.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled():
                raise self._end or EngineUnavailable(f"{name} was taken out with the request in flight")
            return task.result()
        finally:
            task.cancel()  # if the caller was cancelled
            for tasks in tracked_by:
                tasks.discard(task)

    def _with_true_end(self, generation: Generation, sampling: SamplingParams) -> Generation:
        """Correct the finish reason: servers say abort also if the last token would have ended the response anyway."""
        if generation.finish_reason != "abort" or not generation.token_ids:
            return generation
        if generation.token_ids[-1] in self._config.eos_ids or generation.token_ids[-1] in sampling.stop_token_ids:
            return replace(generation, finish_reason="stop")
        if len(generation.token_ids) == sampling.max_new_tokens:
            return replace(generation, finish_reason="length")
        return generation

    @property
    def in_flight(self) -> int:
        """How many requests have been sent and not answered."""
        return len(self._sent)

    async def abort_all(self) -> None:
        """Send nothing of what was asked for before, and return when what was sent has ended; the servers end it."""
        self._aborts += 1
        if self._sent:
            await asyncio.wait(set(self._sent))

    def end_all(self, error: Exception) -> None:
        """End every request, now and later, with ``error``."""
        self._end = error
        for task in self._sent:
            task.cancel()

    async def close(self) -> None:
        """Close the connections to the router."""
        if self._router is not None:
            await self._router.close()


def see_log(restarts: bool) -> str:
    """Return what to do after a server has failed; ``restarts``: with ``--use-fault-tolerance``."""
    remedy = "" if restarts else "; with --use-fault-tolerance engines that fail are restarted"
    return f"the server's log in engines/ of --output-dir states why{remedy}"


# Send requests to the servers of an engine from another process.
#
# ::
#
#     the engine's process                                another process
#     Servers ── SeenServers, at each change ───────────> SharedServers ── Requests (requests.py) ──> the servers
#     Health <── "a request has failed" ────────────────────┘
#
# The other process checks, updates and restarts nothing. It knows the servers by the newest ``SeenServers``.


@dataclass(frozen=True)
class SeenServer:
    """A server in use. ``start`` counts its processes: another one has other requests, be it at the same address."""

    name: str
    start: int
    url: str


@dataclass(frozen=True)
class SeenServers:
    """What a sender of requests must know of the servers.

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


@dataclass(eq=False)
class SharedServer:
    """A server in use, with a client of this process; ``requests.UsedServer``."""

    name: str
    client: ServerClient
    requests: set[asyncio.Task[Any]] = field(default_factory=set)


class SharedServers(UsedServers):
    """The servers by the newest ``SeenServers``."""

    def __init__(self, restarts: bool, connect: Callable[[str], ServerClient]) -> None:
        """Know no server yet. ``connect`` makes the client for a URL."""
        super().__init__(restarts)
        self._connect = connect
        self._by_seen: dict[SeenServer, SharedServer] = {}
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
        for entry in seen.in_use:
            if entry not in self._by_seen:
                self._by_seen[entry] = SharedServer(entry.name, self._connect(entry.url))
        self._wake()

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*self._closing, *(server.client.close() for server in self.in_use))


class ServersSender(Requests):
    """Send requests as the engine does; ``miles.engine.base.RequestSender``."""

    def __init__(self, config: ServersSenderConfig, most: int, check_servers: Callable[[], Awaitable[None]]) -> None:
        self._shared = SharedServers(config.restarts, lambda url: config.connect(url, most, config.keys.server))
        super().__init__(self._shared, config, most, check_servers)

    def show(self, state: SeenServers) -> None:
        """Know the servers as the engine shows them."""
        self._shared.show(state)
        if state.end is not None and self._end is None:
            self.end_all(state.end)

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        await self._shared.close()


@dataclass(frozen=True)
class ServersSenderConfig:
    """The data that a process needs to send requests; ``miles.engine.base.SenderConfig``.

    Attributes:
        client: Talks to a server in its words.
        requests: At once, of all processes together.
        vocab_size: The size of the model's vocabulary.
        eos_ids: The model's own stop tokens.
        keeps_cache: Whether the cache of the old weights outlasts an update of the weights.
        restarts: Whether failed servers are started again.
        router: The address that requests go to; None if there is one server.
        keys: The keys of router and servers.
        experts_shape: Layers and k of a model with experts.
        seconds: The time limit of control calls.
        why: The flag that asks for so many requests, and its value.
    """

    client: type[ServerClient]
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

    def connect(self, url: str, connections: int, key: str | None, admin_key: str | None = None) -> ServerClient:
        """Return a client of the server or router at ``url``, for so many requests at once."""
        return self.client(url, connections, self.seconds, key, admin_key)

    def open(self, requests: int, check_servers: Callable[[], Awaitable[None]]) -> ServersSender:
        """Return what sends up to ``requests`` at once, over as many connections, and keeps these.

        Raises:
            ValueError: The system allows too few open files.
        """
        allow_open_files(requests, self.why)
        return ServersSender(self, requests, check_servers)
