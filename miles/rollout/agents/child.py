"""Become a program that ends with the process that started it: ``python child.py PARENT_PID COMMAND…``.

The kernel keeps the request to be killed with the parent across ``exec``. This file imports nothing of miles, so that
it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h
CANNOT_RUN = 127  # a shell exits with the same status


def main(parent: int, command: list[str]) -> None:
    """Ask the kernel to be killed with ``parent``, and run ``command`` in this process."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_RUN)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
