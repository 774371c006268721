"""A stand-in for an engine's HTTP server: real sockets, scripted latencies, no model.

``serve`` answers ``POST /generate`` with ``{"token_ids": […], "log_probs": […]}`` after a latency drawn from the
request's seed, so that it costs next to nothing and a benchmark measures its caller.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import random
import resource
from multiprocessing.connection import Connection

SIGMA = 0.5  # of the log of a latency: the slowest of 10,000 takes some six times the median


def latency(seed: int, median_seconds: float) -> float:
    """Log-normal, as response lengths roughly are."""
    return median_seconds * math.exp(random.Random(seed).gauss(0.0, SIGMA))


def raise_open_files(wanted: int) -> None:
    """A socket a request needs a file descriptor each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(f"--in-flight: needs {wanted} open files, the system allows {hard}; raise ulimit -n")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def answer_body(tokens: int) -> bytes:
    """The same answer to everyone, serialized once."""
    return json.dumps({"token_ids": [7] * tokens, "log_probs": [-0.123456] * tokens}).encode()


async def _serve_connection(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, reply: bytes, median_seconds: float
) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            request = json.loads(await reader.readexactly(length))
            await asyncio.sleep(latency(request["seed"], median_seconds))
            writer.write(reply)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionResetError):  # the caller has closed the connection
        writer.close()


async def _serve(pipe: Connection, tokens: int, median_seconds: float, connections: int) -> None:
    raise_open_files(3 * connections // 2 + 256)
    body = answer_body(tokens)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reply = head.encode() + body
    server = await asyncio.start_server(
        lambda r, w: _serve_connection(r, w, reply, median_seconds), "127.0.0.1", 0, backlog=connections
    )
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


def _main(pipe: Connection, tokens: int, median_seconds: float, connections: int) -> None:
    asyncio.run(_serve(pipe, tokens, median_seconds, connections))


def start(tokens: int, median_seconds: float, connections: int) -> tuple[multiprocessing.Process, str]:
    """The server's process, which its caller terminates, and its address."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=_main, args=(theirs, tokens, median_seconds, connections), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{ours.recv()}"
