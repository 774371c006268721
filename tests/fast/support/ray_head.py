"""A Ray cluster as ``ray start --head`` starts it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket

import psutil

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
# Ray 2.60 wants a token of whoever talks to a cluster.
ENVIRONMENT = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def free_ports(count: int) -> list[int]:
    sockets = [socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def answers(port: int) -> bool:
    with socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def ray_head(log: Path, is_up: Callable[[], bool], *words: str) -> Iterator[None]:
    """Run ``ray start --head`` in the foreground from when it is up; end only the processes that it started.

    Args:
        log: The file of its output.
        is_up: Whether it has started the processes that the test needs.
        words: Further words of the command, with the ports.
    """
    command = [*RAY, "start", "--head", "--block", "--disable-usage-stats", "--dashboard-agent-listen-port=0", *words]
    with log.open("w") as output:
        head = subprocess.Popen(command, env=ENVIRONMENT, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 300
        while not is_up():
            assert head.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield
    finally:
        started = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        head.wait(120)
        for process in psutil.wait_procs(started, timeout=30)[1]:
            process.kill()
