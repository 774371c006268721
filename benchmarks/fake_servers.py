"""Fake SGLang servers: real sockets, SGLang's answers, scripted latencies, no model.

One process listens on one port per engine and answers ``POST`` after a latency drawn from the request's seed. It reads
nothing else of a request, so that it costs little and a benchmark measures its caller.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import re
import urllib.request
from collections import Counter
from multiprocessing.connection import Connection

from miles.engine.servers.processes import allow_open_files

SIGMA = 0.5  # std of the log of a latency: the slowest of 10,000 takes about six times the median
SEED = re.compile(rb'"sampling_seed": ?(\d+)')
LENGTH = re.compile(rb"content-length: ?(\d+)", re.IGNORECASE)


def latency(seed: int, median_seconds: float) -> float:
    """Return a log-normal latency, the rough distribution of response lengths."""
    return median_seconds * math.exp(random.Random(seed).gauss(0.0, SIGMA))


def answer_body(tokens: int) -> bytes:
    """Return the answer to every request, serialized."""
    meta = {
        "finish_reason": {"type": "stop", "matched": 7},
        "weight_version": "0",
        "weight_versions": [{"version": "0", "start": 0, "end": tokens}],
        "output_token_logprobs": [[-0.123456789, 7, None]] * tokens,
    }
    return json.dumps({"text": "", "output_ids": [7] * tokens, "meta_info": meta}).encode()


_asked: Counter[int] = Counter()  # requests by seed, in the servers' process


def seen(url: str) -> tuple[int, int]:
    """Return how many requests for answers all servers got, and how many different seeds these had."""
    with urllib.request.urlopen(f"{url}/seen") as answer:
        requests, seeds = json.load(answer)
    return requests, seeds


class Connected(asyncio.Protocol):
    """One connection: answer one request after the other, each when its latency has passed."""

    def __init__(self, reply: bytes, median_seconds: float) -> None:
        self._reply = reply
        self._median_seconds = median_seconds
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = LENGTH.search(head)
        if not separator or (length and len(body) < int(length[1])):
            return
        self._received = b""
        if head.startswith(b"GET /seen "):
            counts = json.dumps([sum(_asked.values()), len(_asked)]).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(counts), counts))
            return
        seed = SEED.search(body)
        if seed:
            _asked[int(seed[1])] += 1
        delay = latency(int(seed[1]), self._median_seconds) if seed else 0.0
        asyncio.get_running_loop().call_later(delay, self._transport.write, self._reply)


async def _serve(pipe: Connection, engines: int, tokens: int, median_seconds: float, connections: int) -> None:
    allow_open_files(connections, f"--in-flight {connections}")
    body = answer_body(tokens)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    loop, reply = asyncio.get_running_loop(), head.encode() + body
    servers = [
        await loop.create_server(lambda: Connected(reply, median_seconds), "127.0.0.1", 0, backlog=4096)
        for _ in range(engines)
    ]
    pipe.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _main(pipe: Connection, engines: int, tokens: int, median_seconds: float, connections: int) -> None:
    asyncio.run(_serve(pipe, engines, tokens, median_seconds, connections))


def start(
    engines: int, tokens: int, median_seconds: float, connections: int
) -> tuple[multiprocessing.Process, list[str]]:
    """Start the servers; return their process, which the caller terminates, and the address of each."""
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, engines, tokens, median_seconds, connections)
    process = multiprocessing.Process(target=_main, args=arguments, daemon=True)
    process.start()
    theirs.close()
    return process, [f"http://127.0.0.1:{port}" for port in ours.recv()]
