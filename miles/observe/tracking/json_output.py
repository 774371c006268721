"""Standard output and error as JSON, one object per line: ``--log-format json``."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TextIO

from miles.observe.tracking.jsonl import dump_line

Level = Literal["info", "error"]


def json_line(level: Level, event: str, fields: Mapping[str, Any]) -> str:
    """Return one line of the log: ``time`` (UTC, ISO 8601), ``level``, ``event``, and the fields of the event.

    A field with one of these three names is left out. The line is ASCII, whatever the terminal's encoding.
    """
    now = time.time()
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    fixed = {"time": stamp, "level": level, "event": event}
    return dump_line({**fixed, **fields, **fixed}, ascii_only=True)


def print_event(event: str, fields: Mapping[str, Any]) -> None:
    """Print an event of the run in the block of ``as_json_lines``."""
    stream: Any = sys.stdout
    stream.write_event(event, fields)


@contextmanager
def as_json_lines(is_on: bool) -> Iterator[None]:
    """Turn each line that the block prints, workers' lines and tracebacks included, into a JSON object.

    Lines of text are the event ``text``, or ``error`` if they go to standard error.

    Args:
        is_on: Whether to do so.
    """
    if not is_on:
        yield
        return
    before = sys.stdout, sys.stderr
    streams = _JsonStream(sys.stdout, "info", "text"), _JsonStream(sys.stderr, "error", "error")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.end()
        sys.stdout, sys.stderr = before


class _JsonStream:
    """Pass each line of text on to ``stream`` as a JSON object."""

    def __init__(self, stream: TextIO, level: Level, event: str) -> None:
        self._stream = stream
        self._level: Level = level
        self._event = event
        self._writing = threading.RLock()
        self._rests: dict[int, str] = {}  # of unfinished lines, by thread

    def write(self, text: str) -> int:
        thread = threading.get_ident()
        with self._writing:
            *lines, rest = (self._rests.pop(thread, "") + text).split("\n")
            if rest:
                self._rests[thread] = rest
            for line in lines:
                if line.strip():
                    self._stream.write(json_line(self._level, self._event, {"text": line.rstrip("\r")}))
        return len(text)

    def write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write an event of the run."""
        with self._writing:
            self._stream.write(json_line(self._level, event, fields))
            self._stream.flush()

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def end(self) -> None:
        with self._writing:
            for rest in self._rests.values():
                self._stream.write(json_line(self._level, self._event, {"text": rest}))
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
