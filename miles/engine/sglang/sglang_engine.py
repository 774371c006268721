"""SGLang servers as one engine: requests spread over them, weights sent to all, failures repaired."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

from miles.arguments.sglang.settings import SglangArguments
from miles.concurrency import gather_or_cancel
from miles.engine.base import Generation, GenerationRequest, SamplingParams
from miles.engine.sglang.engine_pool import EnginePool, Member, Server
from miles.engine.sglang.open_files import allow_open_files
from miles.engine.sglang.router import Router
from miles.engine.sglang.sglang_client import EngineUnavailable, SglangClient
from miles.engine.sglang.sglang_weights import SglangReceiver
from miles.engine.sglang.unresponsive import UnresponsiveServerMonitor
from miles.weight_sync.sender import WeightSender
from miles.weights import WeightChunk

REQUEST_TRIES = 8
BACK_OFF_SECONDS = 0.25  # doubled from try to try
MAX_BACK_OFF_SECONDS = 5.0
ABORT_AGAIN_SECONDS = 0.5

Failures = list[tuple[Member, Exception]]


class SglangEngine:
    """Implements ``miles.engine.base.Engine``.

    A request is sent again, wherever the router sends it, when its server does not answer, answers with HTTP 5xx, or
    with something that is no generation; what a server refuses (HTTP 4xx) is an error at once. An answer counts once:
    it is either returned, or its request failed.

    Every server is checked each ``--rollout-health-check-interval``. With ``--use-fault-tolerance``, and then after
    each failed request too, one that fails is restarted, given the current weights, and used again. Without, one that
    fails for ``silence_seconds`` ends all requests with a ``RuntimeError``: nothing else would end those that it has.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        sglang: SglangArguments,
        vocab_size: int,
        sender: WeightSender,
        router: Router | None,
        eos_ids: Collection[int] = (),
        silence_seconds: float = 300.0,
    ) -> None:
        """No server is started before ``start()``. Requests go through ``router``, without which there is one server.

        ``eos_ids``: the model's own stop tokens.
        """
        self._sglang = sglang
        self._concurrency = sglang.sglang_server_concurrency * len(servers)
        self._vocab_size = vocab_size
        self._sender = sender
        self._eos_ids = frozenset(eos_ids)
        self._pause = {"mode": sglang.pause_generation_mode}
        self._flushes = sglang.pause_generation_mode == "retract"
        self._router = router
        self._pool = EnginePool(
            servers,
            self._connect,
            self._bring_up,
            router,
            restart=sglang.use_fault_tolerance,
            router_seconds=sglang.rollout_health_check_timeout,
        )
        self._slots = asyncio.Semaphore(self._concurrency)
        self._sent: set[asyncio.Task[Generation]] = set()
        self._aborts = 0
        self._paused = False
        self._version = 0
        self._updated = False  # until the first update, external engines have weights of an unknown version
        self._silence = UnresponsiveServerMonitor(silence_seconds)
        self._failure: Exception | None = None  # what ended all requests
        self._released: set[str] = set()  # URLs of servers that have given up their memory
        self._current: Iterable[WeightChunk] | None = None  # kept for servers that restart
        self._updating = asyncio.Lock()
        self._asking = 0  # health checks under way
        self._unasked = asyncio.Event()
        self._unasked.set()
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the servers. Raises what ``SglangServer.start`` raises, and ``ValueError`` for too many sockets."""
        allow_open_files(self._concurrency, f"--sglang-server-concurrency {self._sglang.sglang_server_concurrency}")
        await self._pool.open()
        self._watch = asyncio.create_task(self._watch_health())

    def _connect(self, url: str) -> SglangClient:
        return SglangClient(url, self._concurrency)

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        """One ``Generation`` a seed, in order; a request a seed, of which the server prefills the prompt once.

        Seeds do not repeat a response: SGLang honours them under deterministic inference on GPUs only. Raises
        ``ValueError`` for an empty prompt, a token id outside the vocabulary and sampling values outside their range,
        before anything is sent (one such id ends a server), and for what a server refuses; ``RuntimeError`` when
        ``REQUEST_TRIES`` tries failed, no server is left, or one that is not restarted has been silent too long.
        """
        request.sampling.check()
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
        async with self._slots:
            for attempt in range(1, REQUEST_TRIES + 1):
                try:
                    return await self._try(request, seed, aborts)
                except EngineUnavailable as failure:
                    if attempt == REQUEST_TRIES:
                        raise RuntimeError(self._given_up(failure)) from failure
                    await self._pool.suspect_all(self._probe)
                    async with self._updating:  # an update finds out itself who is there, and takes out who is not
                        pass
                    await asyncio.sleep(min(BACK_OFF_SECONDS * 2 ** (attempt - 1), MAX_BACK_OFF_SECONDS))
        raise AssertionError("unreachable")

    async def _try(self, request: GenerationRequest, seed: int, aborts: int) -> Generation:
        async def call(client: SglangClient) -> Generation:
            if self._failure is not None:
                raise self._failure
            if self._aborts != aborts:  # aborted before it was sent
                return Generation([], [], "abort", self._version)
            # What an old prefix has left in the cache is found under an old key only, where the cache is not flushed.
            key = None if self._flushes else str(self._version)
            work = client.generate(request.prompt_ids, request.sampling, seed, self._vocab_size, key)
            return await self._tracked(work)

        sent_under = self._version
        generation = await self._pool.run(call)
        low, high = sorted((sent_under, self._version))
        versions = {generation.weight_version, *(version for version, _ in generation.earlier_versions)}
        if self._updated and not low <= min(versions) <= max(versions) <= high:
            raise EngineUnavailable(f"an answer by weights {sorted(versions)} instead of {self._version}")
        return self._ended(generation, request.sampling)

    def _ended(self, generation: Generation, sampling: SamplingParams) -> Generation:
        """SGLang says abort also of a response whose last token would have ended it anyway."""
        if generation.finish_reason != "abort" or not generation.token_ids:
            return generation
        if generation.token_ids[-1] in self._eos_ids or generation.token_ids[-1] in sampling.stop_token_ids:
            return replace(generation, finish_reason="stop")
        if len(generation.token_ids) == sampling.max_new_tokens:
            return replace(generation, finish_reason="length")
        return generation

    async def _tracked(self, work: Coroutine[Any, Any, Generation]) -> Generation:
        task = asyncio.create_task(work)
        self._sent.add(task)
        try:
            await asyncio.wait([task])
            if task.cancelled() and self._failure is not None:
                raise self._failure
            return task.result()
        finally:
            task.cancel()  # where this one was
            self._sent.discard(task)

    def _given_up(self, failure: EngineUnavailable) -> str:
        way_out = (
            "its log file says why"
            if self._sglang.use_fault_tolerance
            else "its log file says why; with --use-fault-tolerance engines that fail are restarted"
        )
        return f"a request failed {REQUEST_TRIES} times, at last with: {failure}; {way_out}"

    async def update_weights(self, chunks: Iterable[WeightChunk], version: int) -> None:
        """Replace the weights of all servers. Requests in flight wait, and go on with the new weights.

        Under ``--pause-generation-mode retract`` they are prefilled anew; under ``in_place`` what they have computed
        with the old weights stays.

        A server that fails is restarted with ``--use-fault-tolerance``; without, its error is raised. Raises
        ``ValueError`` under ``--check-weight-update-equal`` when weights did not arrive.
        """
        async with self._updating:
            self._current = chunks if self._sglang.use_fault_tolerance else None
            self._version, self._updated = version, True
            failures = await self._install(self._pool.serving, chunks)
        for member, failure in failures:
            if not self._sglang.use_fault_tolerance:
                raise RuntimeError(f"{member.server.name} did not take the weights: {failure}") from failure
            await self._pool.take_out(member, failure)

    async def _install(self, members: Sequence[Member], chunks: Iterable[WeightChunk]) -> Failures:
        """Pause, send, go on; returns who failed. The lock ``_updating`` is held.

        Released memory is taken back in two parts, the cache after the weights: chunks under way need room.
        """
        by_url = {member.connected.url: member for member in members}
        failures = await self._take_memory(members, ["weights"])
        failures += await self._on_each(_without(members, failures), "/pause_generation", self._pause)
        receivers = [
            SglangReceiver(
                member.connected,
                self._sglang.rollout_num_gpus_per_engine,
                flush=self._flushes and member.connected.url not in self._released,  # releasing has flushed it
            )
            for member in _without(members, failures)
        ]
        unsent = await self._sender.send(receivers, chunks, self._version)
        failures += [(by_url[url], failure) for url, failure in unsent.items()]
        failures += await self._take_memory(_without(members, failures), ["kv_cache", "cuda_graph"])
        self._released.clear()  # also of servers that failed, and come back under another URL
        if not self._paused:
            failures += await self._on_each(_without(members, failures), "/continue_generation", {})
        return failures

    async def release_memory(self) -> None:
        """Have every server give up its GPU memory, weights and cache, until ``update_weights``.

        Needs servers with ``--enable-memory-saver``; others answer and keep it. Raises ``RuntimeError`` while requests
        are in flight (SGLang would end), and when a server refuses.
        """
        if self._sent:
            raise RuntimeError(f"{len(self._sent)} requests are in flight: engines release their memory when idle")
        async with self._updating:
            await self._unasked.wait()  # a health check is a request too
            self._released = {member.connected.url for member in self._pool.serving}
            await self._control_all("/release_memory_occupation", {})

    async def _take_memory(self, members: Sequence[Member], tags: list[str]) -> Failures:
        """Have those of ``members`` that have released their memory take the tagged parts of it back."""
        released = [member for member in members if member.connected.url in self._released]
        return await self._on_each(released, "/resume_memory_occupation", {"tags": tags})

    async def _on_each(self, members: Sequence[Member], path: str, body: dict[str, Any]) -> Failures:
        """The same control call to ``members`` at once; returns who failed."""
        seconds = self._sglang.rollout_health_check_timeout
        calls = (member.connected.control(path, body, seconds) for member in members)
        results = await asyncio.gather(*calls, return_exceptions=True)
        return [(member, r) for member, r in zip(members, results, strict=True) if isinstance(r, Exception)]

    @asynccontextmanager
    async def _bring_up(self, member: Member) -> AsyncIterator[None]:
        """Give a server that has just started what the others have: the current weights, and the pause.

        No update begins before the body is done, in which the server joins the others: it would miss this one.
        """
        async with self._updating:
            self._sender.forget_all_but({m.connected.url for m in self._pool.serving})
            if self._released:  # the others have no memory either: weights come with the next update
                self._released.add(member.connected.url)
                await member.connected.control("/release_memory_occupation", {})
            elif self._current is not None:
                for _, failure in await self._install([member], self._current):
                    raise failure
            elif self._paused:
                for _, failure in await self._on_each([member], "/pause_generation", self._pause):
                    raise failure
            yield

    async def pause(self) -> None:
        """Stop at the next token. Requests in flight keep their tokens."""
        self._paused = True
        await self._control_all("/pause_generation", self._pause)

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
        """End every request in flight; each returns what it has. Those that wait for a slot return nothing.

        Of a request that ``retract`` has paused, the server returns the first tokens only: abort before pausing.
        """
        self._aborts += 1
        await self._control_all("/abort_request", {"abort_all": True})  # also of what nobody waits for any more
        ending = set(self._sent)
        while ending:
            await self._control_all("/abort_request", {"abort_all": True})
            if self._paused:  # a request that runs ends with its next token
                await self._control_all("/continue_generation", {})
            # A request that reaches its server after the call that aborts needs another one.
            _, ending = await asyncio.wait(ending, timeout=ABORT_AGAIN_SECONDS)
        if self._paused:
            await self._control_all("/pause_generation", self._pause)

    async def health(self) -> bool:
        """True when a server answers, and has the weights that it should have."""
        checks = (self._healthy(member.connected) for member in self._pool.serving)
        results = await asyncio.gather(*checks, return_exceptions=True)
        return any(not isinstance(result, Exception) for result in results)

    async def close(self) -> None:
        """Stop the servers that were started here."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        await self._pool.close()

    @property
    def _expected(self) -> int | None:
        """The version that every server has; None where any will do."""
        return self._version if self._updated else None

    @property
    def _silent(self) -> bool:
        """Whether servers answer no health check: they are paused, or without memory."""
        return bool(self._paused or self._updating.locked() or self._released)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(self._sglang.rollout_health_check_interval)
            try:
                if self._silent:
                    self._silence.forget()
                elif self._sglang.use_fault_tolerance:
                    await self._pool.suspect_all(self._healthy_unless_updated)
                else:
                    await self._silence.look(self._checks())
            except Exception as failure:  # whatever it is: nobody would watch any more
                self._failure = failure
                for sent in self._sent:
                    sent.cancel()
                return

    def _checks(self) -> dict[str, Coroutine[Any, Any, object]]:
        """The health check of every server by name."""
        checks: dict[str, Coroutine[Any, Any, object]] = {
            m.server.name: self._healthy_unless_updated(m.connected) for m in self._pool.serving
        }
        if self._router is not None:
            checks[self._router.name] = self._router.check(self._sglang.rollout_health_check_timeout)
        return checks

    async def _healthy_unless_updated(self, client: SglangClient) -> bool:
        """False where an update, or what releases memory, leaves it open."""
        if self._silent:
            return False
        version = self._version
        try:
            await self._healthy(client)
            return True
        except EngineUnavailable:
            # An update that began meanwhile has paused the server, and will find out itself whether it answers.
            if not (self._silent or self._version != version):
                raise
            return False

    async def _healthy(self, client: SglangClient) -> None:
        with self._asked():
            await client.check_health(self._expected, self._sglang.rollout_health_check_timeout)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """A health check is under way, for which an idle server has a request."""
        self._asking += 1
        self._unasked.clear()
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                self._unasked.set()

    async def _probe(self, client: SglangClient) -> None:
        """After a failed request: one token, whose answer must be sound. A server that is only busy passes."""
        if self._silent:
            return
        version = self._version
        try:
            with self._asked():
                await client.probe(self._expected, self._vocab_size, self._sglang.rollout_health_check_timeout)
        except EngineUnavailable as failure:
            if self._silent or self._version != version:  # an update that began meanwhile has paused the server
                return
            if not isinstance(failure.__cause__, TimeoutError):
                raise
            await self._healthy_unless_updated(client)  # which is answered out of turn: a busy server passes


def _without(members: Sequence[Member], failures: Failures) -> list[Member]:
    failed = [member for member, _ in failures]
    return [member for member in members if member not in failed]
