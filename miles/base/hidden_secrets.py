"""Hide secrets in what others see of this process: its command line in the process list, and what it prints."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from miles.base.secret_values import hide_in_text, public_words

_ARG_START, _ARG_END = 48, 49  # fields of /proc/PID/stat (man 5 proc_pid_stat)


def hide_on_command_line(words: Sequence[str]) -> None:
    """Overwrite the secrets among ``words`` on this process's command line, which every user of the machine can read.

    They could be read before this call. A file of flags (``@file``) never shows them.
    """
    start, end = _command_line()
    shown = ctypes.string_at(start, end - start)
    hidden = shown
    for word, public in zip(words, public_words(words), strict=True):
        if word != public:
            same = len(os.path.commonprefix([word, public]))
            kept, secret = os.fsencode(word[:same]), os.fsencode(word[same:])
            hidden = hidden.replace(b"\0" + kept + secret + b"\0", b"\0" + kept + b"*" * len(secret) + b"\0")
    if hidden != shown:
        ctypes.memmove(start, hidden, len(hidden))


def _command_line() -> tuple[int, int]:
    """Return where this process's command line begins and ends in its memory."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # from field 3 on
    return int(after_name[_ARG_START - 3]), int(after_name[_ARG_END - 3])


@contextmanager
def hidden_in_output(secrets: Collection[str]) -> Iterator[None]:
    """Replace ``secrets`` in all that the block prints to stdout and stderr, tracebacks and workers' lines included."""
    if not secrets:
        yield
        return
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_HidingStream(stream, secrets) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class _HidingStream:
    """Pass text on to ``stream`` without the secrets."""

    def __init__(self, stream: TextIO, secrets: Collection[str]) -> None:
        self._stream = stream
        self._secrets = secrets

    def write(self, text: str) -> int:
        self._stream.write(hide_in_text(text, self._secrets))
        return len(text)

    def write_event(self, event: str, fields: Mapping[str, Any]) -> None:
        """Pass an event on to a stream that takes some (``--log-format json``)."""
        stream: Any = self._stream
        stream.write_event(event, {self._public(name): self._public(value) for name, value in fields.items()})

    def _public(self, value: Any) -> Any:
        return hide_in_text(value, self._secrets) if isinstance(value, str) else value

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
