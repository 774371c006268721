"""Engines over fake servers: real processes that start at once and misbehave on demand (``fake_server``)."""

import asyncio
import os
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import torch

from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import ServerFlags
from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.servers.keys import keys_of
from miles.engine.servers.processes import ChildProcess, LogFile, free_port
from miles.engine.sglang.engine import SglangEngine
from miles.engine.sglang.launch import is_ready
from miles.engine.sglang.router import Router
from miles.engine.weight_sync.sender import WeightSender
from miles.types.weights import WeightChunk

HERE = str(Path(__file__).parent)
VOCAB = 1000
KEYS = keys_of(ServerFlags(), external=False)
QUICK = {"rollout_health_check_interval": 0.3, "rollout_health_check_timeout": 2.0}
WEIGHTS = [WeightChunk({"w": torch.zeros(3)})]


class FakeServer:
    """One fake server in its own process; implements ``miles.engine.base.Server``."""

    def __init__(self, number, folder):
        self.name = f"engine {number}"
        self.log = LogFile(folder / f"engine_{number}.log")
        self.copies = str(folder / f"host_{number}")
        self.process = None
        self.starts = 0

    async def start(self):
        self.starts += 1
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        path = os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        self.process = ChildProcess("fake_server", [str(port)], environment, self.log, KEYS.server_words)
        await asyncio.to_thread(self.process.wait_until, lambda: is_ready(self.url), 60)
        return self.url

    async def ending(self):
        return await asyncio.to_thread(self.process.ending)

    async def stop(self):
        if self.process is not None:
            await asyncio.to_thread(self.process.stop, 0.0)

    async def update_copy(self, source):
        return await asyncio.to_thread(replace(source, copies=self.copies).update_copy)

    def signal(self, number):
        os.kill(self.process.pid, number)

    async def misbehave(self, fault):
        async with httpx.AsyncClient() as http:
            await http.post(f"{self.url}/misbehave", json={"fault": fault})

    async def seen(self):
        """Return the requests to the current process: the counts ``served`` and ``checked``, and its control calls."""
        async with httpx.AsyncClient() as http:
            return (await http.get(f"{self.url}/seen")).json()


async def ask(engine, prompt):
    request = GenerationRequest(tuple(prompt), (0,), SamplingParams(max_new_tokens=8))
    return (await engine.generate(request))[0]


@asynccontextmanager
async def started_engine(folder, num_servers, updated=True, unresponsive_seconds=300.0, **flags):
    """Give a started engine with weights of version 3, and its servers; the block has 600 s.

    As in a run, two or more servers are behind sglang-router.
    """
    servers = [FakeServer(number, folder) for number in range(num_servers)]
    router = Router((), "127.0.0.1", LogFile(folder / "router.log"), 1024, KEYS) if num_servers > 1 else None
    sglang = SglangArguments(**{"update_weight_transfer_mode": "disk", **flags})
    sender = WeightSender(sglang, folder)
    engine = SglangEngine(
        servers,
        sglang,
        VOCAB,
        sender,
        router,
        unresponsive_seconds=unresponsive_seconds,
        keys=KEYS,
        experts_shape=(2, 1),
    )
    try:
        await engine.start()
        if updated:
            await engine.update_weights(WEIGHTS, 3)
        async with asyncio.timeout(600):
            yield engine, servers
    finally:
        await engine.close()


async def until(holds):
    """Poll until ``holds()``. The test has its own time limit."""
    while not holds():
        await asyncio.sleep(0.02)
