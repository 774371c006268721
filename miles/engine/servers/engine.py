"""Servers as one engine.

``ServersEngine`` only puts three parts together, which share the states of the servers (states.py)::

    requests.py        generate, abort                   a failed request ──> checks by health.py
    weight_updates.py  update_weights, release_memory    a starting server gets its weights here
    health.py          checks at intervals, replacement  no answer will come ──> requests.py ends them

Other processes may send requests to the same servers (requests.py). They have the first part, and the engine
keeps the other two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from miles.config.servers.flags import SglangArguments
from miles.config.settings import Settings
from miles.engine.base import EngineHost, Generation, GenerationRequest, RemoteSenders, Server, ServerPart
from miles.engine.servers.client import ServerClient, ServerReceiver
from miles.engine.servers.health import Health
from miles.engine.servers.keys import NO_KEYS, Keys
from miles.engine.servers.launch import START_SECONDS, ServerOnHost, ServerProgram
from miles.engine.servers.processes import LogFile, allow_open_files
from miles.engine.servers.requests import Requests, ServersSenderConfig
from miles.engine.servers.states import Servers
from miles.engine.servers.weight_updates import WeightUpdates
from miles.engine.sglang.router import Router
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.engine.weight_sync.sender import WeightSender
from miles.models.reading import end_token_ids, read_config
from miles.types.weights import WeightChunk

LOGS = "engines"  # in --output-dir
ABORT_AGAIN_SECONDS = 0.5


class ServersEngine:
    """Generate with servers; implements ``miles.engine.base.Engine``, ``ReleasesMemory``, ``SharesServers``.

    A subclass states how to talk to its servers.
    """

    client: ClassVar[type[ServerClient]]
    receiver: ClassVar[type[ServerReceiver]]

    def __init__(
        self,
        processes: Sequence[Server],
        sglang: SglangArguments,
        vocab_size: int,
        sender: WeightSender,
        router: Router | None,
        eos_ids: Collection[int] = (),
        unresponsive_seconds: float = 300.0,
        keys: Keys = NO_KEYS,
        experts_shape: tuple[int, int] | None = None,
        senders: int = 1,
    ) -> None:
        """Put the engine together. ``start()`` starts the servers.

        Args:
            processes: The servers.
            sglang: Their flags.
            vocab_size: The size of the model's vocabulary.
            sender: Sends weights to them.
            router: Requests go through it; without one they go to the server that has the fewest.
            eos_ids: The model's own stop tokens.
            unresponsive_seconds: Without ``--use-fault-tolerance``: how long a server may pass no health check.
            keys: The keys that servers and router want.
            experts_shape: Layers and experts per token of a model with experts, if servers return their choice.
            senders: How many processes send requests. This one, too, has only a share of them.
        """
        requests = sglang.sglang_server_concurrency * len(processes)
        self._concurrency = share = -(-requests // senders)
        self._sender_config = config = ServersSenderConfig(
            client=self.client,
            requests=requests,
            vocab_size=vocab_size,
            eos_ids=frozenset(eos_ids),
            keeps_cache=sglang.keeps_cache,
            restarts=sglang.use_fault_tolerance,
            router=None if router is None else router.url,
            keys=keys,
            experts_shape=experts_shape,
            seconds=sglang.rollout_health_check_timeout,
            why=f"--sglang-server-concurrency {sglang.sglang_server_concurrency}",
        )
        self.router = router
        self.servers = Servers(
            processes, lambda url: config.connect(url, share, keys.server, keys.admin), restarts=config.restarts
        )
        self._weights = WeightUpdates(self.servers, sglang, sender, self.receiver)
        put_into_use = self._weights.put_into_use
        self._health = Health(self.servers, sglang, vocab_size, router, put_into_use, unresponsive_seconds)
        self._requests = Requests(self.servers, config, share, self.check_servers)
        self._senders: RemoteSenders | None = None

    async def start(self) -> None:
        """Start the servers. Raises what ``Server.start`` raises, and ``ValueError`` for too many sockets."""
        allow_open_files(self._concurrency, self._sender_config.why)
        await self._health.start(end_requests=self._end_requests)

    def sender_config(self) -> ServersSenderConfig:
        """Return what another process needs to send requests; ``SharesServers.sender_config``."""
        return self._sender_config

    async def share(self, senders: RemoteSenders) -> None:
        """Show the servers to other processes, now and whenever they change; ``SharesServers.share``."""
        self._senders = senders
        self.servers.show_to(senders.show)
        await self.servers.wait_until_known()

    async def check_servers(self) -> None:
        """Find the servers that do not work, after a failed request; ``SharesServers.check_servers``."""
        await self._health.check_after_failure()
        async with self.servers.updating:  # an update finds the failed servers itself
            pass

    def _end_requests(self, error: Exception) -> None:
        self._requests.end_all(error)
        self.servers.end(error)

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """Return one ``Generation`` per seed, in order. Each is a request; the server prefills the prompt once.

        Seeds do not repeat a response: SGLang honours them only under deterministic inference on GPUs.

        Raises:
            ValueError: For an empty prompt, a token id outside the vocabulary and sampling values outside their range,
                before anything is sent (one such id ends a server); and for a request that a server refuses.
            RuntimeError: If a request failed too often, no server is left, or a server that is not restarted has been
                unresponsive for too long.
        """
        return await self._requests.generate(request)

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all servers. Requests in flight wait, and continue with the new weights.

        Under ``--pause-generation-mode retract`` they are prefilled again; under ``in_place`` the cache of the old
        weights stays. A server that fails is restarted with ``--use-fault-tolerance``.

        Raises:
            RuntimeError: If a server fails and is not restarted.
            ValueError: Under ``--check-weight-update-equal``, if the weights did not arrive.
        """
        await self._weights.update(chunks, version)

    async def release_memory(self) -> None:
        """Have every server release its GPU memory, weights and cache, until ``update_weights``.

        Needs servers with ``--enable-memory-saver``; others answer and keep their memory. Raises ``RuntimeError`` while
        requests are in flight (SGLang would end), and if a server refuses.
        """
        others = 0 if self._senders is None else await self._senders.in_flight()
        if in_flight := self._requests.in_flight + others:
            raise RuntimeError(f"{in_flight} requests are in flight: engines release their memory when idle")
        await self._weights.release_memory()

    async def abort(self) -> None:
        """End every request in flight. Each returns its tokens so far; those that wait for a slot return nothing."""
        servers = self.servers
        ended = [asyncio.ensure_future(self._requests.abort_all())]
        if self._senders is not None:
            ended.append(asyncio.ensure_future(self._senders.abort_all()))
        try:
            await servers.call_all(lambda client: client.abort_all())  # also requests that nobody waits for any more
            _, ending = await asyncio.wait(ended, timeout=0)
            while ending:
                await servers.call_all(lambda client: client.abort_all())
                # A request that reaches its server after the abort call needs another one.
                _, ending = await asyncio.wait(ending, timeout=ABORT_AGAIN_SECONDS)
            await asyncio.gather(*ended)
        finally:
            for waiting in ended:
                waiting.cancel()

    async def close(self) -> None:
        """Stop the servers that were started here."""
        await self._health.close()
        await self._requests.close()


EngineType = TypeVar("EngineType", bound=ServersEngine)


async def start_servers(
    engine_type: type[EngineType],
    settings: Settings,
    host: EngineHost,
    keys: Keys,
    program_of: Callable[[int, int], ServerProgram],
    external: Sequence[Server] = (),
    router: Callable[[LogFile, int], Router] | None = None,
) -> EngineType:
    """Start an engine of servers.

    Args:
        engine_type: What talks to them.
        settings: The settings of the run.
        host: Starts the servers, and gives the device that sends weights.
        keys: The keys that servers and router want.
        program_of: Returns what a server of a number runs on one of its nodes.
        external: Servers that somebody else starts.
        router: Starts the router of two or more servers, given its log file and the requests at once.
    """
    model = settings.model.hf_checkpoint
    assert model is not None
    config = read_config(model).get_text_config()
    returns_experts = settings.rollout.use_rollout_routing_replay
    output_dir = Path(settings.tracking.output_dir).absolute()

    def log(name: str) -> LogFile:
        return LogFile(output_dir / LOGS / name, settings.sglang.engine_log_max_mb)

    servers: list[Server] = []
    for number in range(settings.num_engines):
        parts = list[ServerPart]()
        for node in range(settings.nodes_per_engine):
            name = f"engine_{number}_node_{node}.log" if node else f"engine_{number}.log"
            build = partial(ServerOnHost, program_of(number, node), log(name))
            parts.append(host.place_server(number, build, START_SECONDS, node))
        servers.append(SpanningServer(parts) if len(parts) > 1 else parts[0])
    servers += external
    requests = settings.sglang.sglang_server_concurrency * len(servers)
    engine = engine_type(
        servers,
        settings.sglang,
        vocab_size=config.vocab_size,
        sender=WeightSender(settings.sglang, settings.weights_folder, host.broadcast_device()),
        router=router(log("router.log"), requests) if router is not None and len(servers) > 1 else None,
        eos_ids=end_token_ids(model),
        unresponsive_seconds=settings.cluster.worker_timeout,
        keys=keys,
        experts_shape=(config.num_hidden_layers, config.num_experts_per_tok) if returns_experts else None,
        senders=settings.rollout.num_rollout_workers,
    )
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return engine


# One server whose devices are on several nodes: a process on each, which meet at an address of the first one.


class SpanningServer:
    """Start and stop the processes of a server together; ``miles.engine.base.Server``.

    The process of the first node answers all requests and passes on to the others what concerns them: generation, new
    weights, pauses, memory. If one of them ends, the first no longer generates, which the health checks find out.
    """

    def __init__(self, parts: Sequence[ServerPart]) -> None:
        """Combine the processes of the nodes, the one that answers first."""
        self._parts = list(parts)
        self.name = f"{parts[0].name} ({len(parts)} nodes)"

    async def start(self) -> str:
        """Start all processes, wait until they serve, and return the URL of the first.

        Raises:
            ServerFailed: One of them does not start. The others are stopped: they would wait for it.
        """
        meeting = await self._parts[0].meeting_address()
        starts = [asyncio.ensure_future(part.start(meeting)) for part in self._parts]
        try:
            urls: list[str] = await asyncio.gather(*starts)
        except BaseException:
            await self.stop()
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        return urls[0]

    async def ending(self) -> str:
        """Return what has ended the first of the processes that have ended."""
        return next(filter(None, await asyncio.gather(*(part.ending() for part in self._parts))), "")

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(part.stop() for part in self._parts))

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Bring the copy of the weights on every node up to date, and return it: it is the same on all."""
        folders = await asyncio.gather(*(part.update_copy(source) for part in self._parts))
        return folders[0]
