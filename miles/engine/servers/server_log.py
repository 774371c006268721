"""The log file of a server process: bounded, without secrets, and never a reason for the server to wait."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import IO

from miles.base.secrets import hide_in_text

TAIL_LINES = 30  # in messages
STORED_LINES = 1000  # a fault may be followed by the tracebacks of what fails because of it


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

    def says(self, text: str) -> bool:
        """Return whether one of the last lines of this start has ``text``, in small or capital letters."""
        return any(text in line.lower() for line in list(self.tail))


class _Writer(RotatingFileHandler):
    """Writes lines; a failure is noted in the launcher's log once."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:
            self.failed = True
            logging.getLogger(__name__).warning("lines are missing from %s", self.baseFilename, exc_info=True)
