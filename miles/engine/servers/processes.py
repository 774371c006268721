"""Server processes and what they need of the system: process groups, ports, open files.

A server runs as ``python -m miles.engine.servers.child PARENT_PID MODULE ARGUMENTS…``. That asks the kernel to kill
the process with its parent, so a launcher that is killed with SIGKILL leaves no server behind. It reads arguments with
secrets from a pipe, because every user can see a command line, and becomes the module. Its output goes to the log
through this process, without the secrets: SGLang prints all its arguments.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from miles.base.processes import kill_group
from miles.base.secrets import hide_in_text, secrets_in
from miles.engine.base import ServerFailed

CHILD = "miles.engine.servers.child"  # what every server runs as
POLL_SECONDS = 0.5
PORT_TRIES = 3  # another process can take a port between the moment it is found free and the moment it is used
ENDING_SECONDS = 1.0  # a process that ends refuses connections shortly before its end is known
COPY_SECONDS = 5.0  # for the rest of the output after the end; a process that has left the group may hold it open
SPARE_FILES = 1024  # open files for everything but the counted sockets, and for sockets that are closing
TAIL_LINES = 30  # in messages
STORED_LINES = 1000  # a fault may be followed by the tracebacks of what fails because of it


# The log file of a server process: bounded, without secrets, and never a reason for the server to wait.


@dataclass(frozen=True)
class LogFile:
    """The file of a server's output, over all its starts.

    When ``path`` would exceed ``max_mb`` megabytes, it becomes ``path`` + ``.1``, instead of the one before.
    """

    path: Path
    max_mb: float = 100.0


class ServerLog:
    """Copies the output of one start of a server into its log file, and keeps the last lines."""

    def __init__(self, file: LogFile, secrets: set[str]) -> None:
        self.path = file.path
        self.tail: deque[str] = deque(maxlen=STORED_LINES)  # of this start
        self._secrets = secrets
        file.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _Writer(
            file.path,
            maxBytes=max(1, int(file.max_mb * 1_000_000)),
            backupCount=1,
            encoding="utf-8",
            errors="surrogateescape",
        )
        self._file.terminator = ""  # the lines have their own

    def copy(self, output: IO[bytes]) -> None:
        """Copy ``output`` line by line until its end, without the secrets.

        A line that cannot be written, for example on a full disk, is dropped: an unread pipe would stop the server.
        """
        with output:
            for raw in output:
                line = hide_in_text(raw.decode(errors="surrogateescape"), self._secrets)
                self.tail.append(line.rstrip("\n"))
                self._file.emit(logging.makeLogRecord({"msg": line}))
        with suppress(OSError):  # the disk is still full
            self._file.close()

    def end(self) -> str:
        """Return the last lines of this start, below the name of the file."""
        return "\n".join([f"{self.path} ends:", *list(self.tail)[-TAIL_LINES:]])

    def mentions(self, text: str) -> bool:
        """Return whether one of the last lines of this start has ``text``, in small or capital letters."""
        return any(text in line.lower() for line in list(self.tail))


class _Writer(RotatingFileHandler):
    """Writes lines; a failure is noted in the launcher's log once."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            logging.getLogger(__name__).warning("lines are missing from %s", self.baseFilename, exc_info=True)


class ChildProcess:
    """Run one server process, in a separate process group, with a log file."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: LogFile,
        secret_arguments: Sequence[str] = (),
        python: str = sys.executable,
    ) -> None:
        """Start ``python -m module arguments secret_arguments`` and append its output to the file ``log``.

        Call this from a thread that lives as long as the server should: the kernel counts that thread as the parent.

        Args:
            module: What to run.
            arguments: The words that every user of the host may see.
            environment: All its environment variables.
            log: The file of its output, and its limit.
            secret_arguments: Further words, which are on no command line; their secrets are not in the log either.
            python: The interpreter, whose import path has ``miles``.
        """
        self.log = ServerLog(log, secrets_in("", list(secret_arguments)))
        command = [python, "-m", CHILD, str(os.getpid()), module, *arguments]
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._copying = threading.Thread(target=self.log.copy, args=(self._process.stdout,), daemon=True)
        self._copying.start()
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it may end before it reads
            pipe.write(json.dumps(list(secret_arguments)).encode())

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    def wait_until(self, serves: Callable[[], bool], seconds: float) -> None:
        """Poll until ``serves()`` is true.

        Raises:
            ServerFailed: If the process ends first, or after ``seconds``. The message ends with the end of the log.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:  # ``serves`` takes time too, above all if the server hangs
            if serves():
                return
            if how := self.ending(POLL_SECONDS):
                raise ServerFailed(f"the server ended {how} before it served; {self._log_end()}")
        self.stop(grace_seconds=0)
        raise ServerFailed(f"the server did not serve within {seconds:g} s; {self._log_end()}")

    def ending(self, seconds: float = ENDING_SECONDS) -> str:
        """Return which signal or exit code has ended the process, as words; "" if it still runs after ``seconds``."""
        try:
            status = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return ""
        if status == -signal.SIGKILL:
            return "by SIGKILL (out of memory, or killed from outside)"
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, and after ``grace_seconds`` SIGKILL to the whole group. Return when the process has ended."""
        if grace_seconds > 0 and self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):  # the group is killed below in any case
                self._process.wait(timeout=grace_seconds)
        kill_group(self._process.pid)
        self._process.wait()
        self._copying.join(COPY_SECONDS)

    def _log_end(self) -> str:
        if self._process.returncode is not None:
            self._copying.join(COPY_SECONDS)
        return self.log.end()


def free_port(host: str) -> int:
    """Return a TCP port of ``host`` that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_taken(host: str, port: int) -> bool:
    """Return whether a TCP port of ``host`` is in use. Closed connections (TIME_WAIT) do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
    return False


def allow_open_files(sockets: int, why: str) -> None:
    """Raise the soft limit of open files to what ``sockets`` connections need.

    Args:
        sockets: How many connections are open at once, one file each.
        why: Begins the error message: the flag that asks for so many, and its value.

    Raises:
        ValueError: If the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = sockets + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(
            f"{why} needs {wanted} open files at once, and the system allows {hard}; give less, or raise the hard "
            f"limit (ulimit -Hn {wanted})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
