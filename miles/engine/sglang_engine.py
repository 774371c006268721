"""SGLang servers as one engine: requests spread over them, weights sent to all, failures repaired."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from miles.arguments.sglang import SglangArguments
from miles.engine.base import Generation, GenerationRequest, WeightChunk
from miles.engine.engine_pool import EnginePool, Member, Server
from miles.engine.open_files import allow_open_files
from miles.engine.router import Router
from miles.engine.sampling import check_sampling
from miles.engine.sglang_client import EngineUnavailable, SglangClient
from miles.engine.sglang_weights import SglangReceiver
from miles.rollout.concurrency import gather_or_cancel
from miles.weight_sync.sender import WeightSender

REQUEST_TRIES = 8
BACK_OFF_SECONDS = 0.25  # doubled from try to try
MAX_BACK_OFF_SECONDS = 5.0
ABORT_AGAIN_SECONDS = 0.5

Failures = list[tuple[Member, Exception]]


class SglangEngine:
    """Implements ``miles.engine.base.Engine``.

    A request is sent again, to another server where there is one, when its server does not answer, answers with HTTP
    5xx, or with something that is no generation; what a server refuses (HTTP 4xx) is an error at once. An answer counts
    once: it is either returned, or its request failed.

    With ``--use-fault-tolerance`` every server is checked each ``--rollout-health-check-interval`` and after each
    failed request; one that fails is restarted, given the current weights, and used again.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        sglang: SglangArguments,
        vocab_size: int,
        sender: WeightSender,
        router: Router | None,
    ) -> None:
        """Nothing is started before ``start()``. Requests go through ``router``, or to servers that are chosen here."""
        self._sglang = sglang
        self._concurrency = sglang.sglang_server_concurrency * len(servers)
        self._vocab_size = vocab_size
        self._sender = sender
        self._pool = EnginePool(servers, self._connect, self._bring_up, router, restart=sglang.use_fault_tolerance)
        self._slots = asyncio.Semaphore(self._concurrency)
        self._sent: set[asyncio.Task[Generation]] = set()
        self._aborts = 0
        self._paused = False
        self._version = 0
        self._current: Iterable[WeightChunk] | None = None  # kept for servers that restart
        self._updating = asyncio.Lock()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the servers. Raises what ``SglangServer.start`` raises, and ``ValueError`` for too many sockets."""
        allow_open_files(self._concurrency, f"--sglang-server-concurrency {self._sglang.sglang_server_concurrency}")
        await self._pool.open()
        if self._sglang.use_fault_tolerance:
            self._watch = asyncio.create_task(self._watch_health())

    def _connect(self, url: str) -> SglangClient:
        return SglangClient(url, self._concurrency)

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """One ``Generation`` a seed, in order; a request a seed, of which the server prefills the prompt once.

        Seeds do not repeat a response: SGLang honours them under deterministic inference on GPUs only. Raises
        ``ValueError`` for an empty prompt, a token id outside the vocabulary and sampling values outside their range,
        before anything is sent (one such id ends a server), and for what a server refuses; ``RuntimeError`` when
        ``REQUEST_TRIES`` tries failed, or no server is left.
        """
        check_sampling(request.sampling)
        self._check_prompt(request.prompt_ids)
        aborts = self._aborts
        return await gather_or_cancel(self._generate_one(request, seed, aborts) for seed in request.seeds)

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise ValueError("an empty prompt cannot be continued: give each prompt at least one token")
        outside = [token for token in prompt_ids if not 0 <= token < self._vocab_size]
        if outside:
            raise ValueError(
                f"prompt token id {outside[0]} is outside the model's vocabulary of {self._vocab_size}: "
                "use the tokenizer of --hf-checkpoint"
            )

    async def _generate_one(self, request: GenerationRequest, seed: int, aborts: int) -> Generation:
        failed: list[Member] = []
        async with self._slots:
            for attempt in range(1, REQUEST_TRIES + 1):
                try:
                    return await self._try(request, seed, aborts, failed)
                except EngineUnavailable as failure:
                    if failure.member is not None:
                        failed.append(failure.member)
                    if attempt == REQUEST_TRIES:
                        raise RuntimeError(self._given_up(failure)) from failure
                    await self._pool.suspect(failure.member, self._probe)
                    await asyncio.sleep(min(BACK_OFF_SECONDS * 2 ** (attempt - 1), MAX_BACK_OFF_SECONDS))
        raise AssertionError("unreachable")

    async def _try(self, request: GenerationRequest, seed: int, aborts: int, avoid: Sequence[Member]) -> Generation:
        async def call(client: SglangClient) -> Generation:
            if self._aborts != aborts:  # aborted before it was sent
                return Generation([], [], "abort", self._version)
            return await self._tracked(client.generate(request.prompt_ids, request.sampling, seed, self._vocab_size))

        sent_under = self._version
        generation, member = await self._pool.run(call, avoid)
        low, high = sorted((sent_under, self._version))
        if not low <= generation.weight_version <= high:
            failure = EngineUnavailable(f"an answer by weights {generation.weight_version} instead of {self._version}")
            failure.member = member
            raise failure
        return generation

    async def _tracked(self, work: Coroutine[Any, Any, Generation]) -> Generation:
        task = asyncio.create_task(work)
        self._sent.add(task)
        try:
            return await task
        finally:
            self._sent.discard(task)

    def _given_up(self, failure: EngineUnavailable) -> str:
        way_out = (
            "its log file says why"
            if self._sglang.use_fault_tolerance
            else "its log file says why; with --use-fault-tolerance engines that fail are restarted"
        )
        return f"a request failed {REQUEST_TRIES} times, at last with: {failure}; {way_out}"

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all servers. Requests in flight are prefilled anew and go on with the new weights.

        A server that fails is restarted with ``--use-fault-tolerance``; without, its error is raised. Raises
        ``ValueError`` under ``--check-weight-update-equal`` when weights did not arrive.
        """
        async with self._updating:
            self._current = chunks if self._sglang.use_fault_tolerance else None
            self._version = version
            failures = await self._install(self._pool.serving, chunks)
        for member, failure in failures:
            if not self._sglang.use_fault_tolerance:
                raise RuntimeError(f"{member.server.name} did not take the weights: {failure}") from failure
            await self._pool.take_out(member, failure)

    async def _install(self, members: Sequence[Member], chunks: Iterable[WeightChunk]) -> Failures:
        """Pause, send, go on; returns who failed. The lock ``_updating`` is held."""
        by_url = {member.connected.url: member for member in members}
        paused = await self._on_each(members, "/pause_generation", {"mode": "retract"})
        receivers = [
            SglangReceiver(member.connected, self._sglang.rollout_num_gpus_per_engine)
            for member in members
            if member not in dict(paused)
        ]
        unsent = await self._sender.send(receivers, chunks, self._version)
        failures = [*paused, *((by_url[url], failure) for url, failure in unsent.items())]
        if not self._paused:
            sound = [member for member in members if member not in dict(failures)]
            failures += await self._on_each(sound, "/continue_generation", {})
        return failures

    async def _on_each(self, members: Sequence[Member], path: str, body: dict[str, Any]) -> Failures:
        """The same control call to ``members`` at once; returns who failed."""
        seconds = self._sglang.rollout_health_check_timeout
        calls = (member.connected.control(path, body, seconds) for member in members)
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [(member, r) for member, r in zip(members, results, strict=True) if isinstance(r, Exception)]

    async def _bring_up(self, member: Member) -> None:
        """Give a server that has just started what the others have: the current weights, and the pause."""
        async with self._updating:
            if self._current is not None:
                for _, failure in await self._install([member], self._current):
                    raise failure
            elif self._paused:
                for _, failure in await self._on_each([member], "/pause_generation", {"mode": "retract"}):
                    raise failure

    async def pause(self) -> None:
        """Stop at the next token. Requests in flight keep their tokens, and are prefilled anew when they go on."""
        self._paused = True
        await self._control_all("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on with the paused requests."""
        self._paused = False
        await self._control_all("/continue_generation", {})

    async def _control_all(self, path: str, body: dict[str, Any]) -> None:
        for member, failure in await self._on_each(self._pool.serving, path, body):
            if not self._sglang.use_fault_tolerance:
                raise RuntimeError(f"{member.server.name}: {failure}") from failure
            await self._pool.take_out(member, failure)

    async def abort(self) -> None:
        """End every request in flight; each returns what it has. Those that wait for a slot return nothing."""
        self._aborts += 1
        await self._control_all("/abort_request", {"abort_all": True})  # also of what nobody waits for any more
        ending = set(self._sent)
        while ending:
            await self._control_all("/abort_request", {"abort_all": True})
            # A request that reaches its server after the call that aborts needs another one.
            _, ending = await asyncio.wait(ending, timeout=ABORT_AGAIN_SECONDS)

    async def health(self) -> bool:
        """True when a server answers, and has the weights that it should have."""
        checks = (self._healthy(member.connected) for member in self._pool.serving)
        results = await asyncio.gather(*checks, return_exceptions=True)
        return any(not isinstance(result, Exception) for result in results)

    async def close(self) -> None:
        """Stop the servers that were started here."""
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._pool.close()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._sglang.rollout_health_check_interval)
            if not (self._paused or self._updating.locked()):  # a paused server answers no health check
                await self._pool.suspect(None, self._healthy_unless_updated)

    async def _healthy_unless_updated(self, client: SglangClient) -> None:
        version = self._version
        try:
            await self._healthy(client)
        except EngineUnavailable:
            # An update that began meanwhile has paused the server, and will find out itself whether it answers.
            if not (self._paused or self._updating.locked() or self._version != version):
                raise

    async def _healthy(self, client: SglangClient) -> None:
        await client.check_health(self._version, self._sglang.rollout_health_check_timeout)

    async def _probe(self, client: SglangClient) -> None:
        """After a failed request: one token, whose answer must be sound."""
        if not (self._paused or self._updating.locked()):
            await client.probe(self._version, self._vocab_size, self._sglang.rollout_health_check_timeout)
