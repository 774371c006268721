"""Give SGLang servers new weights, pause and resume them, and release and take back their memory."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from miles.config.sglang.flags import SglangArguments
from miles.engine.base import Server
from miles.engine.sglang.client import RequestRefused, SglangClient
from miles.engine.sglang.servers import Failures, ManagedServer, Servers, ServerState
from miles.engine.weight_sync.deltas import CopySource, WeightFolder
from miles.engine.weight_sync.sender import WeightSender
from miles.types.weights import WeightChunk

SESSION_OPEN = "session is already open"  # SGLang's words (srt/managers/scheduler_components/weight_updater.py)


class WeightUpdates:
    """Keep the weights, the pause and the memory of all servers the same."""

    def __init__(self, servers: Servers, sglang: SglangArguments, sender: WeightSender) -> None:
        self._servers = servers
        self._sender = sender
        self._ranks = sglang.rollout_num_gpus_per_engine
        self._pause_mode = sglang.pause_generation_mode
        self._flushes = not sglang.keeps_cache
        self._chunks: Iterable[WeightChunk] | None = None  # of the last update, kept for servers that restart

    async def update(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all servers in use; ``SglangEngine.update_weights`` says what that means."""
        servers = self._servers
        async with servers.updating:
            self._chunks = chunks if servers.restarts else None
            servers.version = version
            await servers.shown()  # whoever checks an answer must know the version first
            updated = servers.in_use
            for server in updated:
                server.enter(ServerState.UPDATING)
            failures: Failures | None = None
            try:
                failures = await self._install(updated, chunks)
            finally:
                servers.oldest = version  # before the states, which are shown with it
                for server in updated:
                    if server.state is ServerState.UPDATING:  # otherwise it was taken out meanwhile
                        server.enter(self._state_after(server, failures))
            servers.handle(failures, " did not take the weights")

    def _state_after(self, server: ManagedServer, failures: Failures | None) -> ServerState:
        """Return the state that an update leaves a server in. ``failures`` is None if an error ended the update."""
        if self._servers.memory_released:
            return ServerState.RELEASED
        if self._servers.paused or failures is None or server in [failed for failed, _ in failures]:
            return ServerState.PAUSED
        return ServerState.SERVING

    async def _install(self, updated: Sequence[ManagedServer], chunks: Iterable[WeightChunk]) -> Failures:
        """Pause the servers, send the weights, and resume; return the failures. The lock ``updating`` is held.

        Released memory is taken back in two parts, the cache after the weights: the chunks in transit need room.
        """
        servers = self._servers
        failures: Failures = []
        if servers.memory_released:
            failures += await servers.call(updated, lambda client: client.take_memory(["weights"]))
        failures += await servers.call(_without(updated, failures), lambda client: client.pause(self._pause_mode))
        flush = self._flushes and not servers.memory_released  # releasing the memory has flushed the cache
        by_url = {server.client.url: server for server in _without(updated, failures)}
        receivers = [SglangReceiver(server.client, self._ranks, flush, server.process) for server in by_url.values()]
        assert servers.version is not None
        unsent = await self._sender.send(receivers, chunks, servers.version)
        failures += [(by_url[url], failure) for url, failure in unsent.items()]
        if servers.memory_released:
            rest = ["kv_cache", "cuda_graph"]
            failures += await servers.call(_without(updated, failures), lambda client: client.take_memory(rest))
        servers.memory_released = False  # also for servers that failed: they start with memory
        if not servers.paused:
            failures += await servers.call(_without(updated, failures), lambda client: client.resume())
        return failures

    @asynccontextmanager
    async def put_into_use(self, server: ManagedServer) -> AsyncIterator[None]:
        """Give a starting server the weights and the pause that the others have; after the body it is in use.

        No update begins before the body, in which the server is registered with the router, has ended.
        """
        servers = self._servers
        async with servers.updating:
            self._sender.forget_all_but({other.client.url for other in servers.in_use})
            failures: Failures = []
            if servers.memory_released:  # the others have no memory either; the next update brings weights
                failures = await servers.call([server], lambda client: client.release_memory())
            elif self._chunks is not None:
                failures = await self._install([server], self._chunks)
            elif servers.paused:
                failures = await servers.call([server], lambda client: client.pause(self._pause_mode))
            for _, failure in failures:
                raise failure
            yield
            server.enter(self._state_after(server, failures))

    async def release_memory(self) -> None:
        """Have every server release its memory until the next update. No request may be in flight."""
        servers = self._servers
        async with servers.updating:
            servers.memory_released = True
            for server in servers.in_use:
                server.enter(ServerState.RELEASED)  # no health check begins after this
            await servers.until_unchecked()  # a health check is a request too
            await servers.call_all(lambda client: client.release_memory())

    async def pause(self) -> None:
        """Stop all servers at the next token."""
        self._servers.paused = True
        self._enter_from(ServerState.SERVING, ServerState.PAUSED)
        await self._servers.call_all(lambda client: client.pause(self._pause_mode))

    async def resume(self) -> None:
        """Continue the paused requests."""
        self._servers.paused = False
        self._enter_from(ServerState.PAUSED, ServerState.SERVING)
        await self._servers.call_all(lambda client: client.resume())

    def _enter_from(self, old: ServerState, new: ServerState) -> None:
        """Move the servers in state ``old`` to ``new``. An update in progress decides about its servers at its end."""
        for server in self._servers.in_use:
            if server.state is old:
                server.enter(new)


def _without(servers: Sequence[ManagedServer], failures: Failures) -> list[ManagedServer]:
    failed = [server for server, _ in failures]
    return [server for server in servers if server not in failed]


class SglangReceiver:
    """Receive weights as an SGLang server; ``miles.engine.weight_sync.transport.WeightReceiver``.

    Every call checks the server's reply. An update that fails halfway leaves weights that nobody should use.

    With ``flush``, the last chunk also flushes the prefix cache, which the old weights have computed. SGLang refuses to
    flush it while requests run, so the server must be idle or paused by retraction. Without ``flush``, later requests
    must use another cache key.
    """

    def __init__(self, client: SglangClient, num_ranks: int, flush: bool, process: Server) -> None:
        self.url = client.url
        self._process = process
        self.num_ranks = num_ranks
        self._client = client
        self._flush = flush
        self._received = 0  # bytes of this update

    async def begin_update(self) -> None:
        """Open an update; see ``WeightReceiver``."""
        try:
            await self._client.begin_update()
        except RequestRefused as refusal:
            if SESSION_OPEN not in str(refusal):
                raise
            # A sender that failed halfway, or died, left it open: nobody knows how many bytes it had sent. This update
            # overwrites them.
            await self._client.control("/end_weight_update", {})
            await self._client.begin_update()

    async def end_update(self) -> None:
        """Close the update; see ``WeightReceiver``. The server may convert each weight once more."""
        await self._client.transfer("/end_weight_update", {}, self._received)

    async def load_folder(self, folder: WeightFolder, version: int) -> None:
        """Read all weights from ``folder``; see ``WeightReceiver``."""
        body = {"model_path": folder.path, "load_format": "safetensors", **self._version(version, last=True)}
        await self._client.transfer("/update_weights_from_disk", body, folder.nbytes)

    async def load_copy(self, source: CopySource, version: int) -> None:
        """Read all weights from the copy of the server's host; see ``WeightReceiver``."""
        await self.load_folder(await self._process.update_copy(source), version)

    async def join_group(self, host: str, port: int, group: str, backend: str) -> None:
        """Join a process group; see ``WeightReceiver``."""
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.num_ranks,
            "group_name": group,
            "backend": backend,
        }
        await self._client.control("/init_weights_update_group", body)

    async def receive_broadcast(self, chunk: WeightChunk, group: str, version: int, last: bool) -> None:
        """Take part in the broadcasts of ``chunk``; see ``WeightReceiver``."""
        body = {
            "names": list(chunk.tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in chunk.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in chunk.tensors.values()],
            "group_name": group,
            **self._version(version, last),
        }
        await self._client.transfer("/update_weights_from_distributed", body, chunk.nbytes)
        self._received += chunk.nbytes

    async def receive_shared(self, payloads: Sequence[bytes], nbytes: int, version: int, last: bool) -> None:
        """Load tensors from shared memory; see ``WeightReceiver``."""
        encoded = [base64.b64encode(payload).decode() for payload in payloads]
        body = {"serialized_named_tensors": encoded, **self._version(version, last)}
        await self._client.transfer("/update_weights_from_tensor", body, nbytes)
        self._received += nbytes

    async def scramble(self) -> None:
        """Overwrite every weight with random numbers."""
        await self._client.control("/weights_checker", {"action": "reset_tensors"})

    async def checksums(self) -> dict[str, str]:
        """Return a checksum of every weight, by rank and SGLang's own name."""
        answer = await self._client.control("/weights_checker", {"action": "checksum"})
        return {
            f"rank {number}: {name}": checksum
            for number, rank in enumerate(answer["ranks"])
            for name, checksum in rank["checksums"].items()
        }

    def _version(self, version: int, last: bool) -> dict[str, object]:
        """Set the version, and flush the cache, only with the last chunk, when the weights are complete."""
        return {"flush_cache": last and self._flush, **({"weight_version": str(version)} if last else {})}
