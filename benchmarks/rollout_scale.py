"""Measure one rollout process with many requests in flight: requests per second, CPU per request, and memory.

``python benchmarks/rollout_scale.py --in-flight 8000`` runs the production collector and the production SGLang engine,
including the reward, against fake servers (fake_servers.py) over real sockets, and prints one JSON object.

As in a run, two or more engines are behind sglang-router, whose CPU time is reported separately. The router takes two
open files per request, so 10,000 requests need a hard limit of 21,024. With ``--engines 1`` there is no router; this
process sends all requests to one address in both cases. With ``--no-http`` a timer answers, and only the collector's
own cost remains. CPU seconds count this process only; the servers have their own process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from fake_servers import answer_body, latency, start

from miles.config.rollout import RolloutArguments
from miles.config.servers.flags import SglangArguments
from miles.config.settings import Settings
from miles.engine.base import Generation, GenerationRequest
from miles.engine.servers.processes import LogFile
from miles.engine.sglang.client import read_generation
from miles.engine.sglang.engine import SglangEngine
from miles.engine.sglang.router import Router
from miles.engine.weight_sync.sender import WeightSender
from miles.rollout.groups import GroupTools, generate_group
from miles.rollout.pipeline import build_collector
from miles.tasks.data.stream import PromptStream
from miles.types.sample import Prompt, Sample

SAMPLES = 8  # per prompt
VOCAB = 1000


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=10_000, help="requests at once: prompts x 8 samples")
    parser.add_argument(
        "--engines", type=int, default=20, help="servers that share the requests; with two or more, behind a router"
    )
    parser.add_argument("--rollouts", type=int, default=2, help="measured iterations, after one of warm-up")
    parser.add_argument("--no-http", action="store_true", help="answer from a timer")
    parser.add_argument("--fully-async", action="store_true", help="take groups as they complete")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per answer")
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--median-seconds", type=float, default=2.0, help="median latency of the fake servers")
    return parser.parse_args()


class Running:
    """A server that is already running; implements ``miles.engine.base.Server``."""

    def __init__(self, url: str) -> None:
        self.name = f"fake server {url}"
        self._url = url

    async def start(self) -> str:
        return self._url

    async def stop(self) -> None:
        """Do nothing: the server stops with its process."""


class TimerEngine:
    """The part of an ``Engine`` that a collector uses, without HTTP: parse each answer when its latency has passed."""

    def __init__(self, median_seconds: float, tokens: int) -> None:
        self._median_seconds = median_seconds
        self._body = answer_body(tokens)

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        return list(await asyncio.gather(*(self._one(seed) for seed in request.seeds)))

    async def _one(self, seed: int) -> Generation:
        await asyncio.sleep(latency(seed, self._median_seconds))
        return read_generation(json.loads(self._body), VOCAB)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Counting:
    """Pass requests on to ``engine`` and count them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.in_flight = self.most_in_flight = self.answered = 0

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        self.in_flight += len(request.seeds)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answers = await self._engine.generate(request)
        finally:
            self.in_flight -= len(request.seeds)
        self.answered += len(answers)
        return answers


class NoText:
    """A tokenizer that costs nothing, so that only the collector is measured."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return ""


async def alternating(samples: list[Sample]) -> list[float]:
    """Return rewards that differ within every group."""
    return [float((s.trajectory_id or 0) % 2) for s in samples]


async def engine_of(options: argparse.Namespace, urls: list[str], router: Router | None, folder: Path) -> Any:
    if options.no_http:
        return TimerEngine(options.median_seconds, options.tokens)
    sglang = SglangArguments(sglang_server_concurrency=math.ceil(options.in_flight / options.engines))
    engine = SglangEngine([Running(url) for url in urls], sglang, VOCAB, WeightSender(sglang, folder), router)
    await engine.start()
    return engine


def router_cpu() -> float:
    """Return the CPU seconds of the router so far, or 0 without one. It is the child that is not a fake server."""
    servers = {process.pid for process in multiprocessing.active_children()}
    router = [process for process in psutil.Process().children() if process.pid not in servers]
    return sum(sum(process.cpu_times()[:2]) for process in router)


async def measure(options: argparse.Namespace, urls: list[str], router: Router | None, folder: Path) -> dict[str, Any]:
    groups = options.in_flight // SAMPLES
    rollout = RolloutArguments(
        rollout_batch_size=groups // 2 if options.fully_async else groups,  # twice as many are in flight
        n_samples_per_prompt=SAMPLES,
        rollout_max_response_len=options.tokens,
        async_steps=int(options.fully_async),
        fully_async=options.fully_async,
    )
    stream = PromptStream([Prompt("", (5,) * options.prompt_len)], shuffle=False, seed=0)
    engines = await engine_of(options, urls, router, folder)
    engine: Any = Counting(engines)
    tools = GroupTools(engine, NoText(), generate_group, alternating)
    collector = build_collector(Settings(rollout=rollout), stream, tools, options.rollouts + 1)
    await collector.collect(0)
    answered, router_seconds = engine.answered, router_cpu()
    cpu, wall = time.process_time(), time.perf_counter()
    for iteration in range(1, options.rollouts + 1):
        collector.weights_changed(iteration)
        await collector.collect(iteration)
    answered = engine.answered - answered
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    router_seconds = router_cpu() - router_seconds
    await engines.close()
    return {
        "in_flight": engine.most_in_flight,
        "engines": 0 if options.no_http else options.engines,
        "fully_async": options.fully_async,
        "tokens": options.tokens,
        "requests_per_second": round(answered / wall, 1),
        "cpu_ms_per_request": round(1000 * cpu / answered, 3),
        "requests_per_cpu_second": round(answered / cpu),
        "router_cpu_ms_per_request": round(1000 * router_seconds / answered, 3) if router is not None else None,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    options = parse()
    server, urls = start(options.engines, options.tokens, options.median_seconds, options.in_flight)
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            routed = options.engines > 1 and not options.no_http
            router = Router((), "127.0.0.1", LogFile(folder / "router.log"), options.in_flight) if routed else None
            print(json.dumps(asyncio.run(measure(options, urls, router, folder))))
    finally:
        server.terminate()


if __name__ == "__main__":
    main()
