"""Give servers new weights, and release and take back their memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from miles.config.servers.flags import SglangArguments
from miles.engine.servers.client import ServerReceiver
from miles.engine.servers.states import Failures, ManagedServer, Servers, ServerState
from miles.engine.weight_sync.sender import WeightSender
from miles.types.weights import WeightChunk


class WeightUpdates:
    """Keep the weights and the memory of all servers the same."""

    def __init__(
        self, servers: Servers, sglang: SglangArguments, sender: WeightSender, receiver: type[ServerReceiver]
    ) -> None:
        self._servers = servers
        self._receiver = receiver
        self._sender = sender
        self._ranks = sglang.rollout_num_gpus_per_engine
        self._pause_mode = sglang.pause_generation_mode
        self._flushes = not sglang.keeps_cache
        self._chunks: Iterable[WeightChunk] | None = None  # of the last update, kept for servers that restart

    async def update(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all servers in use; ``ServersEngine.update_weights`` states what that means."""
        servers = self._servers
        async with servers.updating:
            self._chunks = chunks if servers.restarts else None
            servers.version = version
            await servers.wait_until_known()  # whoever checks an answer must know the version first
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
            await servers.handle(failures, " did not take the weights")

    def _state_after(self, server: ManagedServer, failures: Failures | None) -> ServerState:
        """Return the state that an update leaves a server in. ``failures`` is None if an error ended the update."""
        if self._servers.memory_released:
            return ServerState.RELEASED
        if failures is None or server in [failed for failed, _ in failures]:
            return ServerState.PAUSED
        return ServerState.SERVING

    async def _install(self, updated: Sequence[ManagedServer], chunks: Iterable[WeightChunk]) -> Failures:
        """Pause the servers, send the weights, and resume; return the failures. The lock ``updating`` is held.

        Released memory is taken back in two parts, the cache after the weights: the chunks in transit need room.
        """
        servers = self._servers
        failures: Failures = []
        if servers.memory_released:
            failures += await servers.call(updated, lambda client: client.take_memory(for_weights=True))
        failures += await servers.call(_without(updated, failures), lambda client: client.pause(self._pause_mode))
        flush = self._flushes and not servers.memory_released  # releasing the memory has flushed the cache
        by_url = {server.client.url: server for server in _without(updated, failures)}
        receivers = [self._receiver(server.client, self._ranks, flush, server.process) for server in by_url.values()]
        assert servers.version is not None
        unsent = await self._sender.send(receivers, chunks, servers.version)
        failures += [(by_url[url], failure) for url, failure in unsent.items()]
        if servers.memory_released:
            failures += await servers.call(
                _without(updated, failures), lambda client: client.take_memory(for_weights=False)
            )
        servers.memory_released = False  # also for servers that failed: they start with memory
        failures += await servers.call(_without(updated, failures), lambda client: client.resume())
        return failures

    @asynccontextmanager
    async def put_into_use(self, server: ManagedServer) -> AsyncIterator[None]:
        """Give a starting server the weights that the others have; after the body it is in use.

        The body registers the server with the router; no update begins before it has ended.
        """
        servers = self._servers
        async with servers.updating:
            self._sender.forget_all_but({other.client.url for other in servers.in_use})
            failures: Failures = []
            if servers.memory_released:  # the others have no memory either; the next update brings weights
                failures = await servers.call([server], lambda client: client.release_memory())
            elif self._chunks is not None:
                failures = await self._install([server], self._chunks)
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


def _without(servers: Sequence[ManagedServer], failures: Failures) -> list[ManagedServer]:
    failed = [server for server, _ in failures]
    return [server for server in servers if server not in failed]
