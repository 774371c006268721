"""How the queue starts a command: as a process, or as a fork of one process that has imported everything already.

A training run needs seconds to import what it uses. A fork has it at once, and shares its memory.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Protocol


class Child(Protocol):
    """A started command, in a session of its own."""

    def poll(self) -> int | None:
        """Return its exit status, negative for the signal that ended it; None while it runs."""

    def wait(self) -> int:
        """Wait for its end and return its exit status. One thread calls it."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal."""


Starter = Callable[[Sequence[str], Path, Mapping[str, str]], Child]  # of words, log and environment


def start_process(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process; it inherits the cores of the calling thread.

    Args:
        words: The program and its arguments.
        log: The file to which it appends what it prints.
        environment: All of its variables.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal reaches only the sweep
        )


class Forks:
    """Starts commands as forks of one process, which imports some modules before the first of them."""

    def __init__(self, prefix: Sequence[str], function: Callable[[list[str]], object], modules: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            prefix: The words with which every command begins, and which are not passed on.
            function: Called in each fork with the other words; a function of a module. It raises SystemExit for a
                status other than 0.
            modules: Imported once. They must not start threads, which a fork would lack.
        """
        self._prefix = list(prefix)
        self._function = function
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*modules])
        self._lock = threading.Lock()  # the lists of multiprocessing are not made for several threads

    def __call__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """Start a fork on the cores of the calling thread; as ``start_process``."""
        begin = len(self._prefix)
        assert list(words[:begin]) == self._prefix, "the function stands for these words"
        cores = frozenset(os.sched_getaffinity(0))
        process = self._context.Process(
            target=_run, args=(self._function, list(words[begin:]), str(log), dict(environment), cores)
        )
        with self._lock:
            process.start()
        return _Fork(process)


class _Fork:
    """A fork. The thread that waits for it is the only one that asks for its status."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None, "it has started"
        self._process = process
        self._pid = process.pid
        self._status: int | None = None

    def poll(self) -> int | None:
        return self._status

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        self._status = self._process.exitcode
        return self._status

    def send_signal(self, sig: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its status is on the way
            os.kill(self._pid, sig)


def _run(
    function: Callable[[list[str]], object], words: list[str], log: str, environment: dict[str, str], cores: set[int]
) -> None:
    """Do what a new process would begin with, and call the function."""
    os.setsid()
    with open(log, "ab") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server of forks ignores it
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    try:
        function(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
