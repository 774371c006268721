"""Recognize an error of standard output: nobody reads it, as after `| head`, or it is a file on a full disk."""

from __future__ import annotations

import errno
import os
import select
import sys
from typing import TextIO

_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def fault_of_output(error: Exception) -> str | None:
    """Return what is wrong with standard output if that is why ``error`` was raised; else None.

    What is printed from then on is lost: Python would complain again when it closes the stream.
    """
    if isinstance(error, BrokenPipeError) and not (_is_closed(sys.stdout) or _is_closed(sys.stderr)):
        return None  # of another pipe or connection, or of another process
    if not isinstance(error, BrokenPipeError) and getattr(error, "errno", None) not in _CANNOT_WRITE:
        return None
    fault = "standard output was closed"
    if not isinstance(error, BrokenPipeError):
        try:
            os.write(sys.stdout.fileno(), b"\n")  # what could not be written is no longer in the stream
            return None
        except OSError as again:
            fault = f"standard output cannot be written ({again.strerror})"
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return fault


def _is_closed(stream: TextIO) -> bool:
    """Return whether the other end of a pipe or terminal is closed."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # no file, as in a notebook
        return False
    look = select.poll()
    look.register(number, 0)  # errors are reported in any case
    return bool(look.poll(0))
