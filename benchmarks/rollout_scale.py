"""What one rollout process can feed: requests a second, CPU a request and memory, at many requests in flight.

``python benchmarks/rollout_scale.py --in-flight 10000`` runs the production collector, reward included, against a
stand-in engine (stand_in_engine.py) over real sockets, and prints one JSON object. ``--client none`` leaves HTTP out:
what remains is the collector's own cost. CPU seconds are this process's alone, the server has a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import httpx
from stand_in_engine import answer_body, latency, raise_open_files, start

from miles.arguments.reward import RewardArguments
from miles.arguments.rollout import RolloutArguments
from miles.data.stream import PromptStream
from miles.engine.base import Generation, GenerationRequest
from miles.rollout.generate import generate_group
from miles.rollout.source import build_source
from miles.sample import Prompt, Sample

SAMPLES = 8  # a prompt


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=10_000, help="requests at once: prompts x 8 samples")
    parser.add_argument("--rollouts", type=int, default=3, help="measured, after one to warm up")
    parser.add_argument("--client", choices=["aiohttp", "httpx", "none"], default="aiohttp")
    parser.add_argument("--fully-async", action="store_true", help="groups are taken as they complete")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--median-seconds", type=float, default=2.0, help="latency of the stand-in")
    return parser.parse_args()


class StandInClient:
    """The part of an ``Engine`` that a collector uses: one HTTP request a response."""

    def __init__(self, post: Any, median_seconds: float, tokens: int) -> None:
        self._post = post
        self._median_seconds = median_seconds
        self._body = answer_body(tokens)
        self.in_flight = self.most_in_flight = self.requests = 0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        return list(await asyncio.gather(*(self._one(request, seed) for seed in request.seeds)))

    async def _one(self, request: GenerationRequest, seed: int) -> Generation:
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self._post is None:
            await asyncio.sleep(latency(seed, self._median_seconds))
            body = self._body
        else:
            body = await self._post({"seed": seed, "input_ids": request.prompt_ids})
        self.in_flight -= 1
        answer = json.loads(body)
        return Generation(answer["token_ids"], answer["log_probs"], "stop", 0)


@asynccontextmanager
async def connected(kind: str, url: str, connections: int) -> AsyncIterator[Any]:
    """A function that posts JSON to the stand-in and gives the reply's bytes; None for ``none``."""
    if kind == "none":
        yield None
    elif kind == "httpx":
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None, trust_env=False) as client:

            async def post(payload: dict[str, Any]) -> bytes:
                return (await client.post("/generate", json=payload)).content

            yield post
    else:
        connector = aiohttp.TCPConnector(limit=connections)
        no_timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(url, connector=connector, timeout=no_timeout) as session:

            async def post(payload: dict[str, Any]) -> bytes:
                async with session.post("/generate", json=payload) as response:
                    return await response.read()

            yield post


class NoText:
    """A tokenizer that costs nothing: the collector is measured."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


async def alternating(samples: list[Sample]) -> list[float]:
    """A reward that keeps every group useful."""
    return [float((s.rollout_id or 0) % 2) for s in samples]


async def measure(options: argparse.Namespace, url: str) -> dict[str, Any]:
    groups = options.in_flight // SAMPLES
    settings = RolloutArguments(
        rollout_batch_size=groups // 2 if options.fully_async else groups,  # twice as many are in play
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=options.tokens,
        async_steps=int(options.fully_async),
        fully_async=options.fully_async,
    )
    stream = PromptStream([Prompt("", (5,) * options.prompt_len)], shuffle=False, seed=0)
    async with connected(options.client, url, options.in_flight) as post:
        engine: Any = StandInClient(post, options.median_seconds, options.tokens)
        source = build_source(
            stream, engine, NoText(), alternating, settings, RewardArguments(), 0, generate_group, options.rollouts + 1
        )
        await source.collect(0)
        requests, cpu, wall = engine.requests - engine.in_flight, time.process_time(), time.perf_counter()
        for rollout_id in range(1, options.rollouts + 1):
            source.weights_arrived(rollout_id)
            await source.collect(rollout_id)
        answered = engine.requests - engine.in_flight - requests
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "client": options.client,
        "fully_async": options.fully_async,
        "most_in_flight": engine.most_in_flight,
        "requests_per_second": round(answered / wall, 1),
        "cpu_ms_per_request": round(1000 * cpu / answered, 3),
        "requests_per_cpu_second": round(answered / cpu),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "tokens": options.tokens,
    }


def main() -> None:
    options = parse()
    raise_open_files(3 * options.in_flight // 2 + 256)  # a closing socket keeps its file for a while
    server, url = start(options.tokens, options.median_seconds, options.in_flight)
    try:
        print(json.dumps(asyncio.run(measure(options, url))))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
