"""Start SGLang servers: the command line and environment of one, its process, and servers started by others."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from weakref import finalize

import httpx

from miles.base.disk_faults import disk_fault, naming_disk
from miles.base.host import num_cores
from miles.base.secrets import split_secret_words
from miles.base.stacks import RUN_FOLDER
from miles.config.sglang.flags import has_flag
from miles.engine.base import ServerFailed
from miles.engine.sglang.client import WRONG_KEY
from miles.engine.sglang.keys import NO_KEYS, Keys, bearer
from miles.engine.sglang.leftovers import begin_notes, remove_server_folder
from miles.engine.sglang.processes import PORT_TRIES, ChildProcess, free_port, is_taken
from miles.engine.sglang.server_log import LogFile
from miles.engine.weight_sync.deltas import CopySource, WeightFolder

START_SECONDS = 1800  # large models load for minutes
GRACE_SECONDS = 3.0  # SGLang drains for five seconds before it looks whether it is idle
PORT_TAKEN = "address already in use"  # in the words of the system
EXTERNAL_SECONDS = 1800  # for a server that somebody else starts
EXTERNAL_HEALTH_SECONDS = 60.0
EXTERNAL_POLL_SECONDS = 1.0

CORES = "SGLANG_CPU_OMP_THREADS_BIND"  # the variable that names the cores of each rank

SERVER_PROCESS = "miles.engine.sglang.server_process"  # runs one of these modules
MODULE = "sglang.launch_server"
MODULE_ON_CPU = "sglang_on_cpu"  # in cpu/, which is on the import path of servers on CPU

# Flags that SGLang needs, or runs better with, on CPU: (flag, value, other spellings that the user may have given).
# The limit in tokens bounds the cache, and so does the fraction of memory. SGLang does not start if its weights, and
# the memory that other processes take while it loads, exceed the fraction. With 0.1 it did not start on a busy host.
_ON_CPU = (
    ("--device", "cpu", ()),
    ("--attention-backend", "torch_native", ("--prefill-attention-backend", "--decode-attention-backend")),
    ("--sampling-backend", "pytorch", ()),
    ("--disable-overlap-schedule", None, ()),
    ("--max-total-tokens", "32768", ()),
    ("--mem-fraction-static", "0.5", ()),
    ("--sleep-on-idle", None, ()),
)


class PortTaken(ServerFailed):
    """Another process has taken the server's port since it was found free."""


@dataclass(frozen=True)
class ServerSpec:
    """Describe one server, and derive its command line and environment. Starts no process.

    Attributes:
        model_path: The model that it serves.
        dtype: ``bfloat16`` or ``float32``.
        device: ``cpu`` or ``cuda``.
        num_devices: Its tensor-parallel size.
        seed: Its random seed.
        flags: The user's ``--sglang-*`` words, without the prefix.
        releases_memory: Whether it can release its GPU memory and take it back, by the package torch-memory-saver.
        keys: The keys that it wants.
        is_deterministic: Whether the seed of a request decides its answer, whatever else the server computes.
        fp32_head: Whether it computes its logits in fp32.
        says_experts: Whether answers can contain the experts that were chosen.
        reads_text: Whether it has the model's tokenizer, and so can end a response at a text.
        nodes: The nodes that its devices are on.
        node: Which of them this process is on, from 0. The process on the first one answers.
    """

    model_path: str
    dtype: str
    device: str
    num_devices: int
    seed: int
    flags: tuple[str, ...] = field(default=(), repr=False)
    releases_memory: bool = False
    keys: Keys = NO_KEYS
    is_deterministic: bool = False
    fp32_head: bool = False
    says_experts: bool = False
    reads_text: bool = False
    nodes: int = 1
    node: int = 0

    @property
    def module(self) -> str:
        """What ``python -m`` runs."""
        return MODULE_ON_CPU if self.device == "cpu" else MODULE

    def arguments(self, host: str, port: int, meeting: str | None = None) -> list[str]:
        """Return the words after ``python -m module`` that hold no secrets. The user's flags replace the defaults.

        ``meeting`` is the address at which the processes of several nodes meet.
        """
        words = ["--model-path", self.model_path, "--host", host, "--port", str(port)]
        words += ["--skip-server-warmup", "--weight-version", "0"]
        words += [] if self.reads_text else ["--skip-tokenizer-init"]
        if self.nodes > 1:
            assert meeting is not None, "the processes of several nodes meet at an address"
            words += ["--nnodes", str(self.nodes), "--node-rank", str(self.node), "--dist-init-addr", meeting]
        defaults = [
            ("--tp-size", str(self.num_devices), ("--tp", "--tensor-parallel-size")),
            ("--dtype", self.dtype, ()),
            ("--random-seed", str(self.seed), ()),
            *(_ON_CPU if self.device == "cpu" else ()),
            *([("--enable-memory-saver", None, ())] if self.releases_memory else ()),
            *([("--enable-deterministic-inference", None, ())] if self.is_deterministic else ()),
            *([("--enable-fp32-lm-head", None, ())] if self.fp32_head else ()),
            *([("--enable-return-routed-experts", None, ())] if self.says_experts else ()),
        ]
        for flag, value, spellings in defaults:
            if not has_flag(self.flags, flag, *spellings):
                words += [flag] if value is None else [flag, value]
        plain, _ = split_secret_words(self.flags)
        return [*words, *plain]

    @property
    def secret_arguments(self) -> list[str]:
        """The keys, and the user's flags with secrets: words that belong on no command line."""
        _, secret = split_secret_words(self.flags)
        return [*secret, *self.keys.server_words]  # the keys last: they are the user's, or replace nothing

    def environment(self, given: Mapping[str, str], rendezvous: Path) -> dict[str, str]:
        """Return the environment ``given`` with what a server needs in addition.

        Its ranks meet at the file ``rendezvous``. Otherwise they would meet at an address, for which torch listens on
        all interfaces and takes reads and writes from everybody. Ranks on several nodes have no other way.
        """
        # The router asks /health before it takes a server, and a server must answer that while it is paused or busy.
        # Our own checks ask /health_generate whether it generates.
        common = {**given, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if self.nodes == 1:
            common["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{rendezvous}"
        if self.device != "cpu":
            return common
        path = os.pathsep.join(filter(None, [str(cpu_support()), given.get("PYTHONPATH")]))
        # One thread per server: with more, and a busy neighbour, OpenMP's waiting threads starve the scheduler.
        # Ranks on the cores in turn: without it SGLang starts no more ranks than the host has memory nodes.
        cores = "|".join(str(rank % num_cores()) for rank in range(self.num_devices))
        defaults = {"OMP_NUM_THREADS": "1"} | ({CORES: cores} if self.num_devices > 1 else {})
        return {**defaults, **common, "PYTHONPATH": path, "SGLANG_USE_CPU_ENGINE": "1"}


def cpu_support() -> Path:
    """Return the folder of replacement packages that only server processes on CPU see."""
    return Path(__file__).parent / "cpu"


class SglangServer:
    """Start and stop a server on this host; ``miles.engine.base.ServerProcess``.

    It can be started again after each stop. Each start takes a free port; all starts share one log file.
    """

    def __init__(self, spec: ServerSpec, log: LogFile, host: str) -> None:
        self._spec = spec
        self._log = log
        self._host = host
        self._process: ChildProcess | None = None
        self._remove_folder: finalize[[Path], SglangServer] | None = None  # called also when this process exits

    def meeting_address(self) -> str:
        """Return an address of this host at which the processes of several nodes can meet."""
        return f"{self._host}:{free_port(self._host)}"

    def start(self, meeting: str | None = None) -> str:
        """Start, wait until the server is ready, and return its URL.

        Args:
            meeting: The address at which it meets its processes on other nodes, if it has any.

        Raises:
            ValueError: If SGLang is not installed.
            ServerFailed: If the server does not start; the message ends with the end of its log.
            WriteFailed: If this host's disk has no room for its temporary files.
        """
        assert self._process is None, "stop() comes before the next start()"
        if find_spec("sglang") is None:
            raise ValueError(
                "--rollout-engine sglang: SGLang is not installed here; install it (docs/engine.md has the command for "
                "CPU), use --rollout-external with engines that run elsewhere, or use --rollout-engine torch"
            )
        for attempt in range(1, PORT_TRIES + 1):
            try:
                return self._start_on(free_port(self._host), meeting)
            except PortTaken:
                if attempt == PORT_TRIES:
                    raise
            except ServerFailed as failure:
                # The server's log may not have had room for the reason.
                if fault := disk_fault(_temporary(), failure):
                    raise ServerFailed(f"{fault} on host {socket.gethostname()}; {failure}") from failure
                raise
        raise AssertionError("unreachable")

    def _start_on(self, port: int, meeting: str | None) -> str:
        url = f"http://{self._host}:{port}"
        with _naming_disk():
            folder = Path(mkdtemp(prefix="e", dir=_temporary()))  # short: sockets are in it; only this user may enter
            self._remove_folder = finalize(self, remove_server_folder, folder)
            begin_notes(folder)
        environment = self._spec.environment(os.environ, folder / "store") | {"TMPDIR": str(folder)}
        arguments = self._spec.arguments(self._host, port, meeting)
        secret = self._spec.secret_arguments
        words = [self._spec.module, *arguments]
        process = self._process = ChildProcess(SERVER_PROCESS, words, environment, self._log, secret)
        try:
            process.wait_until(
                lambda: is_ready(url, self._spec.keys.server) if self._spec.node == 0 else answers(url, "/health"),
                START_SECONDS,
            )
        except ServerFailed as failure:
            self.stop()
            if is_taken(self._host, port) or process.log.says(PORT_TAKEN):  # it may be free again
                raise PortTaken(str(failure)) from failure
            raise
        except BaseException:
            self.stop()
            raise
        return url

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to the process group. Does nothing if no server runs."""
        if self._process is not None:
            self._process.stop(GRACE_SECONDS)
            self._process = None
        if self._remove_folder is not None:
            self._remove_folder()
            self._remove_folder = None

    @property
    def pid(self) -> int | None:
        """The process id of the server, or None if none runs."""
        return None if self._process is None else self._process.pid


def _temporary() -> Path:
    """Return the folder of what a server writes on its host."""
    return Path(os.environ.get(RUN_FOLDER) or gettempdir())


def _naming_disk() -> AbstractContextManager[None]:
    what = f"a temporary file of the server on host {socket.gethostname()}"
    return naming_disk(_temporary(), what=what, then="make room there")


def is_ready(url: str, key: str | None = None) -> bool:
    """Return whether the server at ``url`` has loaded its model, reports that it is ready, and takes the key.

    Without a key, the server of another run that has taken the port meanwhile counts too.
    """
    return answers(url, "/ready") and (key is None or answers(url, "/model_info", key))


def answers(url: str, path: str, key: str | None = None) -> bool:
    """Return whether the server at ``url`` answers ``path`` without an error.

    The process of a further node knows /health only, and answers when it has loaded its part of the model.
    """
    try:
        return httpx.get(url + path, headers=bearer(key), timeout=5.0, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False


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

    async def stop(self) -> None:
        """Leave the server running: it is not ours to stop."""

    async def update_copy(self, source: CopySource) -> WeightFolder:
        """Do nothing: nothing of this run is on the server's host."""
        raise AssertionError("check_engine() refuses deltas for engines that are running already")
