"""One SGLang server on this host: started on a free port, awaited, stopped."""

from __future__ import annotations

import os
import socket
from importlib.util import find_spec
from pathlib import Path

import httpx

from miles.engine.child_process import ChildProcess, ServerFailed
from miles.engine.sglang_command import ServerSpec

START_SECONDS = 1800  # large models load for minutes
GRACE_SECONDS = 3.0  # SGLang drains for five before it looks whether it is idle
PORT_TRIES = 3
PORT_TAKEN = "address already in use"


class SglangServer:
    """Start and stop a server again and again; each start has a port of its own. One log file takes all of them."""

    def __init__(self, spec: ServerSpec, host: str, log: Path) -> None:
        self._spec = spec
        self._host = host
        self._log = log
        self._process: ChildProcess | None = None

    def start(self) -> str:
        """Start, wait until it answers, and return its URL.

        Raises ``ValueError`` where SGLang is not installed, ``ServerFailed`` with the end of the log when it does not
        come up.
        """
        assert self._process is None, "stop() comes before the next start()"
        if find_spec("sglang") is None:
            raise ValueError(
                "--rollout-engine sglang: SGLang is not installed here; install it (docs/engine.md has the command for "
                "CPU), use --rollout-external with engines that run elsewhere, or use --rollout-engine torch"
            )
        for attempt in range(PORT_TRIES):
            try:
                return self._start_on(free_port(self._host))
            except ServerFailed as failure:
                # Between being found free and being used, a port can be taken by another process.
                if PORT_TAKEN not in str(failure).lower() or attempt == PORT_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _start_on(self, port: int) -> str:
        url = f"http://{self._host}:{port}"
        environment = self._spec.environment(os.environ)
        self._process = ChildProcess(self._spec.module, self._spec.arguments(self._host, port), environment, self._log)
        try:
            self._process.wait_until(lambda: answers(url), START_SECONDS)
        except BaseException:
            self.stop()
            raise
        return url

    def stop(self) -> None:
        """SIGTERM, then SIGKILL to the process group. Nothing happens where no server runs."""
        if self._process is not None:
            self._process.stop(GRACE_SECONDS)
            self._process = None

    @property
    def pid(self) -> int | None:
        """Process id of the server, None while there is none."""
        return None if self._process is None else self._process.pid


def answers(url: str) -> bool:
    """Whether the server at ``url`` has loaded its model and says that it is ready."""
    try:
        return httpx.get(f"{url}/ready", timeout=5.0, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def free_port(host: str) -> int:
    """A TCP port of ``host`` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
