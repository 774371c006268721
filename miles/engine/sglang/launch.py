"""Start SGLang servers: the command line and environment of one, and servers started by others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import httpx

from miles.base.host import num_cores
from miles.engine.base import ServerFailed
from miles.engine.servers.keys import NO_KEYS, Keys, bearer
from miles.engine.servers.launch import Default, ServerProgram, answers
from miles.engine.sglang.client import WRONG_KEY
from miles.engine.weight_sync.deltas import CopySource, WeightFolder

EXTERNAL_SECONDS = 1800  # for a server that somebody else starts
EXTERNAL_HEALTH_SECONDS = 60.0
EXTERNAL_POLL_SECONDS = 1.0

CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # the variable that names the cores of each rank

MODULE = "sglang.launch_server"
MODULE_ON_CPU = "sglang_on_cpu"  # in cpu/, which is on the import path of servers on CPU

# Flags that SGLang needs, or runs better with, on CPU.
# The limit in tokens bounds the cache, and so does the fraction of memory. SGLang does not start if its weights, and
# the memory that other processes take while it loads, exceed the fraction. With 0.1 it did not start on a busy host.
_ON_CPU: tuple[Default, ...] = (
    ("--device", "cpu", ()),
    ("--attention-backend", "torch_native", ("--prefill-attention-backend", "--decode-attention-backend")),
    ("--sampling-backend", "pytorch", ()),
    ("--disable-overlap-schedule", None, ()),
    ("--max-total-tokens", "32768", ()),
    ("--mem-fraction-static", "0.5", ()),
    ("--sleep-on-idle", None, ()),
)
_IMAGES_ON_CPU: Default = ("--mm-attention-backend", "sdpa", ())


@dataclass(frozen=True)
class SglangProgram(ServerProgram):
    """Describe one server; ``miles.engine.servers.launch.ServerProgram``.

    Attributes:
        is_deterministic: Whether the seed of a request decides its answer, whatever else the server computes.
        fp32_head: Whether it computes its logits in fp32.
        returns_experts: Whether answers can contain the experts that were chosen.
        nodes: The nodes that its devices are on.
        node: Which of them this process is on, from 0. The process on the first one answers.
    """

    title = "SGLang"

    is_deterministic: bool = False
    fp32_head: bool = False
    returns_experts: bool = False
    nodes: int = 1
    node: int = 0

    def check(self) -> None:
        """Raise ``ValueError`` if SGLang is not installed."""
        if find_spec("sglang") is None:
            raise ValueError(
                "--rollout-engine sglang: SGLang is not installed here; install it (docs/engine.md has the command for "
                "CPU), use --rollout-external with engines that run elsewhere, or use --rollout-engine torch"
            )

    def is_ready(self, url: str) -> bool:
        """Return whether the server at ``url`` serves; the process of a further node, whether it is healthy."""
        return is_ready(url, self.keys.server) if self.node == 0 else answers(url, "/health")

    @property
    def module(self) -> str:
        """What ``python -m`` runs."""
        return MODULE_ON_CPU if self.device == "cpu" else MODULE

    def arguments(self, host: str, port: int, meeting: str | None = None) -> list[str]:
        """Return the words after ``python -m module``; ``ServerProgram.arguments``."""
        words = ["--model-path", self.model_path, "--host", host, "--port", str(port)]
        words += ["--skip-server-warmup", "--weight-version", "0"]
        if self.nodes > 1:
            assert meeting is not None, "the processes of several nodes meet at an address"
            words += ["--nnodes", str(self.nodes), "--node-rank", str(self.node), "--dist-init-addr", meeting]
        switches = {
            "--enable-memory-saver": self.releases_memory,
            "--enable-deterministic-inference": self.is_deterministic,
            "--enable-fp32-lm-head": self.fp32_head,
            "--enable-return-routed-experts": self.returns_experts,
        }
        defaults: list[Default] = [
            ("--tp-size", str(self.num_devices), ("--tp", "--tensor-parallel-size")),
            ("--dtype", self.dtype, ()),
            ("--random-seed", str(self.seed), ()),
            *(_ON_CPU if self.device == "cpu" else ()),
            *((_IMAGES_ON_CPU,) if self.device == "cpu" and self.reads_images else ()),
            *((switch, None, ()) for switch, is_on in switches.items() if is_on),
        ]
        return self._with_flags(words, defaults)

    @property
    def secret_arguments(self) -> list[str]:
        """The user's flags with secrets, and the keys: last, as they are the user's, or replace nothing."""
        return [*super().secret_arguments, *self.keys.server_words]

    def environment(self, base: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment ``base`` with the variables that a server needs in addition.

        Its ranks meet at a file in ``folder``. Otherwise they would meet at an address, for which torch listens on
        all interfaces and takes reads and writes from everybody. Ranks on several nodes have no other way.
        """
        # The router asks /health before it takes a server, and a server must answer that while it is paused or busy.
        # Our own checks ask /health_generate whether it generates.
        common = {**base, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if self.reads_images:  # the tokens of a prompt stay as they were sent; no update empties the cache of images
            common |= {"SGLANG_MM_AVOID_RETOKENIZE": "1", "SGLANG_VLM_CACHE_SIZE_MB": "0"}
        if self.nodes == 1:
            common["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder / 'store'}"
        if self.device != "cpu":
            return common
        folders = [cpu_support()]
        if not self.reads_images:
            folders.append(cpu_support() / "without_images")
        path = os.pathsep.join(filter(None, [*map(str, folders), base.get("PYTHONPATH")]))
        # One thread per server: with more, and a busy neighbour, OpenMP's waiting threads starve the scheduler.
        # Ranks on the cores in turn: without it SGLang starts no more ranks than the host has memory nodes.
        cores = "|".join(str(rank % num_cores()) for rank in range(self.num_devices))
        defaults = {"OMP_NUM_THREADS": "1"} | ({CORES: cores} if self.num_devices > 1 else {})
        return {**defaults, **common, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}


def cpu_support() -> Path:
    """Return the folder of replacement packages that only server processes on CPU see."""
    return Path(__file__).parent / "cpu"


def is_ready(url: str, key: str | None = None) -> bool:
    """Return whether the server at ``url`` has loaded its model, reports that it is ready, and takes the key.

    Without a key, the server of another run that has taken the port meanwhile counts too.
    """
    return answers(url, "/ready") and (key is None or answers(url, "/model_info", key))


class ExternalServer:
    """Use a server that somebody else starts and stops; ``miles.engine.base.Server``.

    It is one address of ``--rollout-external-engine-addrs``. After a failure it is waited for instead of restarted: it
    is used again when it answers again.
    """

    def __init__(self, address: str, keys: Keys = NO_KEYS) -> None:
        """Use the server at ``address``, which wants ``keys``: HOST:PORT, with or without http:// before it."""
        self._keys = keys
        self._url = "http://" + address.removeprefix("http://").rstrip("/")
        self.name = f"the engine at {self._url}"

    async def start(self) -> str:
        """Wait until the server generates, and return its URL.

        Raises ``ServerFailed`` after ``EXTERNAL_SECONDS``, and ``ValueError`` if the server wants another key.

        A run that was killed may have left the server paused, so this resumes it. It asks the server's own generation
        test, not /ready: once that test has failed, /ready stays negative until the test is asked again.
        """
        try:
            async with asyncio.timeout(EXTERNAL_SECONDS):
                while not await self._generates():
                    await asyncio.sleep(EXTERNAL_POLL_SECONDS)
        except TimeoutError:
            raise ServerFailed(
                f"--rollout-external-engine-addrs: no SGLang server generated at {self._url} within "
                f"{EXTERNAL_SECONDS} s; start it, or correct the address"
            ) from None
        return self._url

    async def _generates(self) -> bool:
        async with httpx.AsyncClient(base_url=self._url, timeout=EXTERNAL_HEALTH_SECONDS, trust_env=False) as http:
            try:
                resumed = await http.post("/continue_generation", json={}, headers=bearer(self._keys.admin))
                if resumed.status_code in (401, 403):
                    raise ValueError(f"--rollout-external-engine-addrs {self._url}: {WRONG_KEY}")
                return (await http.get("/health_generate")).status_code == 200
            except httpx.TransportError:
                return False

    async def ending(self) -> str:
        """Return nothing: the process is not ours to see."""
        return ""

    async def stop(self) -> None:
        """Leave the server running: it is not ours to stop."""

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Do nothing: nothing of this run is on the server's host."""
        raise AssertionError("check_engine() refuses deltas for engines that are running already")
