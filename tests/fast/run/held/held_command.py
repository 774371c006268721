"""A command below a process that the kernel makes the parent of whatever the command leaves: nothing can hide."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import weakref
from contextlib import suppress
from typing import Any

import psutil

# Starts the command, states its process id and later its exit status, and ends when no process is left below it.
HOLDER = """
import ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
environment = os.environ | {"HOLDER": str(os.getpid())}
command = subprocess.Popen(sys.argv[2:], env=environment, start_new_session=True)
said = int(sys.argv[1])
os.write(said, b"%d\\n" % command.pid)
for number in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
while True:
    try:
        pid, status = os.wait()
    except ChildProcessError:
        break
    if pid == command.pid:
        os.write(said, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""


class HeldCommand(subprocess.Popen):  # type: ignore[type-arg]
    """A command in its own session. Its processes are those below the holder, and no mark of theirs is looked at."""

    def __init__(self, command: list[str], **options: Any) -> None:
        reader, writer = os.pipe()
        holder = [sys.executable, "-I", "-S", "-c", HOLDER, str(writer)]
        super().__init__([*holder, *command], pass_fds=(writer,), start_new_session=True, **options)
        os.close(writer)
        self._said = os.fdopen(reader, "rb", buffering=0)
        weakref.finalize(self, self._said.close)
        self._holder = psutil.Process(self.pid)
        self.pid = int(self._said.readline())

    def poll(self) -> int | None:
        return self._status(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._status(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def _status(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._said], [], [], seconds)[0]:
            self.returncode = int(self._said.readline())
        return self.returncode

    def processes(self) -> list[psutil.Process]:
        """Return every process that comes from the command and is alive."""
        processes = []
        with suppress(psutil.NoSuchProcess):  # none is left
            for process in self._holder.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        processes.append(process)
        return processes

    def none_left(self, seconds: float) -> bool:
        """Return whether all have ended, after waiting up to ``seconds``."""
        _, alive = psutil.wait_procs(self.processes(), timeout=seconds)
        with suppress(psutil.TimeoutExpired):
            self._holder.wait(1.0)  # it ends with the last of them
        return not alive and not self._holder.is_running()

    def end(self) -> None:
        """End its remaining processes."""
        while not self.none_left(0.1):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
