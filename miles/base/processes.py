"""Child processes of this machine: what they import, how they end, and that they end with their parent.

As a program, ``python processes.py PARENT COMMAND…`` becomes a command that ends with the process ``PARENT``: the
kernel keeps the request to be killed with the parent across ``exec``. It starts in milliseconds, so what is slow to
import is imported inside functions.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor
    from subprocess import Popen

    from psutil import Process


RUN_FOLDER = "MILES_RUN_FOLDER"  # environment variable: the folder of a run's temporary files
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CANNOT_RUN = 127  # a shell exits with the same status


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def killed_with_parent(*command: str) -> list[str]:
    """Return the words of a command that ``die_with_parent`` ties to the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def pool_of(workers: int, method: str, prepare: Callable[[], object] | None = None) -> ProcessPoolExecutor:
    """Return a pool of processes that end with this one. Waiting workers of a plain pool outlive a killed parent.

    Args:
        workers: The most processes.
        method: ``fork`` or ``spawn``.
        prepare: Called first in each process; one that is spawned has to unpickle it.
    """
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(workers, multiprocessing.get_context(method), _begin, (os.getpid(), prepare))


def _begin(parent: int, prepare: Callable[[], object] | None) -> None:
    die_with_parent(parent)
    if prepare is not None:
        prepare()


def same_imports(*first: str) -> dict[str, str]:
    """Return the environment in which a Python process imports what this one can, and before it from ``first``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*first, *(entry or os.getcwd() for entry in sys.path)])}


def importing_miles() -> dict[str, str]:
    """Return the import path of processes that need this miles, also from a checkout that is not installed."""
    import miles

    package = os.path.dirname(os.path.dirname(os.path.realpath(miles.__file__)))
    checkout = "" if package.startswith(sys.prefix) else package
    return {"PYTHONPATH": os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))}


def end(process: Popen[Any], seconds: float) -> None:
    """Send SIGTERM to a child that runs, and SIGKILL after so many seconds; return when it has ended."""
    from subprocess import TimeoutExpired

    process.terminate()
    try:
        process.wait(seconds)
    except TimeoutExpired:
        process.kill()
        process.wait()


def kill_group(group: int) -> None:
    """Kill what is left of a group of processes."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def kill_all(processes: Collection[Process], seconds: float) -> set[int]:
    """Kill the processes, and wait up to ``seconds`` until they have ended; return the ids of those that it killed."""
    import psutil

    killed: set[int] = set()
    for process in processes:
        with suppress(psutil.Error):  # it has ended meanwhile
            process.kill()
            killed.add(process.pid)
    psutil.wait_procs(processes, timeout=seconds)
    return killed


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        print(f"cannot run {sys.argv[2]}: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_RUN)
