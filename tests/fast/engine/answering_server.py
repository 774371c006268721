"""A server on the test's event loop that answers as SGLang does, holds answers back, and lists its requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from aiohttp import web

SPECIAL = 8  # token ids that no answer has


class AnsweringServer:
    """One SGLang server without a model. An answer is a function of prompt and seed.

    Attributes:
        asked: How often each seed was asked for.
        versions: The version that was the newest when each request arrived.
    """

    def __init__(self, vocab: int) -> None:
        self.asked: Counter[int] = Counter()
        self.versions: Counter[str] = Counter()
        self.peers: set[tuple[str, int]] = set()
        self.in_flight = self.most_in_flight = 0
        self.version = "0"
        self.controls: list[str] = []
        self.fails = False
        self.held: set[int] = set()  # seeds that are not answered before an abort
        self.latency = 0.0
        self._vocab = vocab
        self._answers = asyncio.Event()
        self._answers.set()
        self._aborts = asyncio.Event()
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen on a free port; return HOST:PORT."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/health_generate", self._ok),
                web.get("/model_info", self._model_info),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/update_weights_from_disk", self._load),
                *(web.post(f"/{name}_generation", self._control) for name in ("pause", "continue")),
            ]
        )
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        host, port = self._runner.addresses[0]
        return f"{host}:{port}"

    async def stop(self) -> None:
        """Listen no more."""
        assert self._runner is not None
        self.answer()
        await self._runner.cleanup()

    def hold(self) -> None:
        """Answer nothing until ``answer``."""
        self._answers.clear()

    def answer(self) -> None:
        """Answer what was held, and what comes."""
        self._answers.set()

    async def until(self, in_flight: int) -> None:
        """Wait until so many requests are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_flight >= in_flight)

    async def _count(self, change: int) -> None:
        async with self._changed:
            self.in_flight += change
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            self._changed.notify_all()

    async def _ok(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def _control(self, request: web.Request) -> web.Response:
        self.controls.append(request.path)
        return await self._ok(request)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _load(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return await self._ok(request)

    async def _abort(self, request: web.Request) -> web.Response:
        aborts, self._aborts = self._aborts, asyncio.Event()
        aborts.set()
        return await self._ok(request)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.fails:
            raise web.HTTPInternalServerError
        prompt, sampling = body["input_ids"], body["sampling_params"]
        seed = sampling["sampling_seed"]
        self.asked[seed] += 1
        self.versions[self.version] += 1
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        await self._count(1)
        try:
            tokens, reason = answer_to(prompt, seed, sampling["max_new_tokens"], self._vocab), "stop"
            aborts = self._aborts
            waits = [asyncio.ensure_future(aborts.wait())]
            if seed not in self.held:
                waits.append(asyncio.ensure_future(self._answers.wait()))
            await asyncio.sleep(self.latency * random.Random(seed).random())
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if aborts.is_set():
                tokens, reason = tokens[:1], "abort"
            meta = {
                "finish_reason": {"type": reason},
                "weight_version": self.version,
                "output_token_logprobs": [[-token / self._vocab, token, None] for token in tokens],
            }
            return web.json_response({"output_ids": tokens, "meta_info": meta})
        finally:
            await self._count(-1)


def answer_to(prompt: list[int], seed: int, longest: int, vocab: int) -> list[int]:
    """Return the tokens that answer a prompt under a seed."""
    draw = random.Random(f"{prompt} {seed}")
    return [draw.randrange(SPECIAL, vocab) for _ in range(draw.randint(min(2, longest), longest))]
