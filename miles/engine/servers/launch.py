"""Start one server on this host: its process, temporary folder, port and log."""

from __future__ import annotations

import os
import socket
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from typing import TYPE_CHECKING, Any, ClassVar, Self
from weakref import finalize

import httpx

from miles.base.disk_faults import disk_fault, naming_disk
from miles.base.processes import RUN_FOLDER
from miles.base.secrets import split_secret_words
from miles.config.model import has_vision_tower
from miles.config.servers.passed_on import has_flag
from miles.engine.base import ServerFailed
from miles.engine.servers.keys import NO_KEYS, Keys, bearer
from miles.engine.servers.leftovers import begin_notes, remove_server_folder
from miles.engine.servers.processes import PORT_TRIES, ChildProcess, LogFile, free_port, is_taken

if TYPE_CHECKING:
    from miles.config.settings import Settings

START_SECONDS = 1800  # large models load for minutes
GRACE_SECONDS = 3.0  # SGLang drains for five seconds before it looks whether it is idle
PORT_TAKEN = "address already in use"  # in the words of the system
SERVER_PROCESS = "miles.engine.servers.server_process"  # runs the module of a server

Default = tuple[str, str | None, tuple[str, ...]]  # a flag, its value, other spellings that the user may have given


@dataclass(frozen=True)
class ServerProgram(ABC):
    """Describe one server, and derive its command line and environment. Starts no process.

    Attributes:
        title: The name of the program in messages.
        model_path: The model that it serves.
        dtype: ``bfloat16`` or ``float32``.
        device: ``cpu`` or ``cuda``.
        num_devices: Its tensor-parallel size.
        seed: Its random seed.
        keys: The keys that it wants.
        flags: The user's words for it, without the prefix.
        releases_memory: Whether it can release its GPU memory and take it back.
        reads_images: Whether it serves a model with its vision tower.
        reads_text: Whether it has the model's tokenizer, and so can end a response at a text.
        python: The interpreter of the environment that it runs in.
    """

    title: ClassVar[str]

    model_path: str
    dtype: str
    device: str
    num_devices: int
    seed: int
    keys: Keys = NO_KEYS
    flags: tuple[str, ...] = field(default=(), repr=False)
    releases_memory: bool = False
    reads_images: bool = False
    reads_text: bool = False
    python: str = sys.executable

    @classmethod
    def of(cls, settings: Settings, device: str, number: int, keys: Keys, **more: Any) -> Self:
        """Return server ``number`` of a run. Servers differ only in their seeds; ``more`` are fields of the subclass.

        It has all settings, because a server's command line gathers many sections.
        """
        assert settings.model.hf_checkpoint is not None
        return cls(
            model_path=settings.model.hf_checkpoint,
            dtype="bfloat16" if settings.training.bf16 else "float32",
            device=device,
            num_devices=settings.sglang.rollout_num_gpus_per_engine,
            seed=settings.data.rollout_seed + number,
            keys=keys,
            releases_memory=settings.offload(device).rollout,
            reads_images=has_vision_tower(settings.model, if_absent=False),
            reads_text=bool(settings.rollout.stop_texts),
            **more,
        )

    @property
    @abstractmethod
    def module(self) -> str:
        """What ``python -m`` runs."""

    @abstractmethod
    def check(self) -> None:
        """Raise ``ValueError`` if the program is not installed."""

    @abstractmethod
    def arguments(self, host: str, port: int, meeting: str | None = None) -> list[str]:
        """Return the words after ``python -m module`` that hold no secrets. The user's flags replace the defaults.

        ``meeting`` is the address at which the processes of several nodes meet.
        """

    @abstractmethod
    def environment(self, base: Mapping[str, str], folder: Path) -> dict[str, str]:
        """Return the environment ``base`` with a server's additional variables. ``folder`` is its temporary folder."""

    @abstractmethod
    def is_ready(self, url: str) -> bool:
        """Return whether the server at ``url`` serves, and is this one: another run's may have taken the port."""

    @property
    def secret_arguments(self) -> list[str]:
        """The user's flags with secrets: words that belong on no command line."""
        return split_secret_words(self.flags)[1]

    def _with_flags(self, words: list[str], defaults: Iterable[Default]) -> list[str]:
        """Return ``words``, the ``defaults`` that the user has not set, and the user's flags without secrets."""
        if not (self.reads_text or self.reads_images):  # a processor of images reads and writes text
            words += ["--skip-tokenizer-init"]
        for flag, value, spellings in defaults:
            if not has_flag(self.flags, flag, *spellings):
                words += [flag] if value is None else [flag, value]
        return [*words, *split_secret_words(self.flags)[0]]


class PortTaken(ServerFailed):
    """Another process has taken the server's port since it was found free."""


class ServerOnHost:
    """Start and stop a server on this host; ``miles.engine.base.ServerProcess``.

    It can be started again after each stop. Each start takes a free port; all starts share one log file.
    """

    def __init__(self, spec: ServerProgram, log: LogFile, host: str) -> None:
        self._spec = spec
        self._log = log
        self._host = host
        self._process: ChildProcess | None = None
        self._remove_folder: finalize[[Path], ServerOnHost] | None = None  # called also when this process exits

    def meeting_address(self) -> str:
        """Return an address of this host at which the processes of several nodes can meet."""
        return f"{self._host}:{free_port(self._host)}"

    def start(self, meeting: str | None = None) -> str:
        """Start, wait until the server is ready, and return its URL.

        Args:
            meeting: The address at which it meets its processes on other nodes, if it has any.

        Raises:
            ValueError: If the program is not installed.
            ServerFailed: If the server does not start; the message ends with the end of its log.
            WriteFailed: If this host's disk has no room for its temporary files.
        """
        assert self._process is None, "stop() comes before the next start()"
        self._spec.check()
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
        what = f"a temporary file of the server on host {socket.gethostname()}"
        with naming_disk(_temporary(), what=what, then="make room there"):
            folder = Path(mkdtemp(prefix="e", dir=_temporary()))  # short: sockets are in it; only this user may enter
            self._remove_folder = finalize(self, remove_server_folder, folder)
            begin_notes(folder)
        environment = self._spec.environment(os.environ, folder) | {"TMPDIR": str(folder)}
        arguments = self._spec.arguments(self._host, port, meeting)
        secret = self._spec.secret_arguments
        words = [self._spec.module, *arguments]
        server = f"the {self._spec.title} server on port {port}"
        print(f"starting {server}; its log is {self._log.path}", file=sys.stderr, flush=True)
        began = time.monotonic()
        process = self._process = ChildProcess(SERVER_PROCESS, words, environment, self._log, secret, self._spec.python)
        try:
            process.wait_until(lambda: self._spec.is_ready(url), START_SECONDS)
        except ServerFailed as failure:
            self.stop()
            if is_taken(self._host, port) or process.log.mentions(PORT_TAKEN):  # it may be free again
                raise PortTaken(str(failure)) from failure
            raise
        except BaseException:
            self.stop()
            raise
        print(f"{server} is ready after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return url

    def ending(self) -> str:
        """Return what has ended the server; ``miles.engine.base.ServerProcess.ending``."""
        return "" if self._process is None else self._process.ending()

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
    """Return the folder of the files that a server writes on its host."""
    return Path(os.environ.get(RUN_FOLDER) or gettempdir())


def answers(url: str, path: str, key: str | None = None) -> bool:
    """Return whether the server at ``url`` answers ``path`` without an error.

    The process of a further node knows /health only, and answers when it has loaded its part of the model.
    """
    try:
        return httpx.get(url + path, headers=bearer(key), timeout=5.0, trust_env=False, verify=False).status_code == 200
    except httpx.TransportError:
        return False
