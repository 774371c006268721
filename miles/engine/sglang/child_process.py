"""Server processes: started in a group of their own, with a log file each, and never outliving whoever started them.

``python -m miles.engine.sglang.child_process PARENT_PID MODULE ARGUMENTS…`` is what is run: it asks the kernel to
be killed with its parent, then becomes the module. A launcher that is killed with SIGKILL therefore leaves no server
behind.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOG_TAIL_LINES = 30
POLL_SECONDS = 0.5


class ServerFailed(RuntimeError):
    """A server process ended before it served; the message ends with the last lines of its log."""


class ChildProcess:
    """One server process and whatever it starts."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """Start ``python -m module arguments``; its output is appended to ``log``.

        Call it from a thread that lives as long as the server shall: the kernel counts that thread as the parent.
        """
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "miles.engine.sglang.child_process", str(os.getpid()), module, *arguments]
        with log.open("ab") as output:
            self._start_of_log = output.tell()
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and the id of its process group."""
        return self._process.pid

    def wait_until(self, serves: Callable[[], bool], seconds: float) -> None:
        """Poll until ``serves()``. Raises ``ServerFailed`` when the process ends before, or after ``seconds``."""
        for _ in range(int(seconds / POLL_SECONDS)):
            if serves():
                return
            try:
                status = self._process.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            raise ServerFailed(f"the server ended with status {status} before it served; {self._log_end()}")
        self.stop(grace_seconds=0)
        raise ServerFailed(f"the server did not serve within {seconds:g} s; {self._log_end()}")

    def stop(self, grace_seconds: float) -> None:
        """SIGTERM, then, when ``grace_seconds`` have passed, SIGKILL to the whole group. Returns when it has ended."""
        if grace_seconds > 0 and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):  # the group is killed below in any case
                self._process.wait(timeout=grace_seconds)
        with suppress(ProcessLookupError):  # nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_end(self) -> str:
        with self.log.open("rb") as file:
            file.seek(self._start_of_log)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join([f"{self.log} ends:", *lines[-LOG_TAIL_LINES:]])


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended in between
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
