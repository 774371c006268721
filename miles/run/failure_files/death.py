"""Say how a worker process died: by a signal that it could still log, or by one that leaves no trace.

Ray does not report the signal. Its processes write ``*** SIGILL received …`` to their own log before they end by a
fault of native code. SIGKILL, which the system sends when memory runs out, cannot be logged, and user code
that calls ``os._exit`` leaves no trace either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray._private import worker as ray_worker
from ray.exceptions import OutOfMemoryError, RayActorError

from miles.run.ray_watch import how_node_ended

# What Ray raises for a call of an actor whose process has ended; the second if Ray has ended it to save its host.
DEATHS = (RayActorError, OutOfMemoryError)
END_BYTES = 100_000  # of a log; the stacks follow the line
_PID = re.compile(r"\bpid: (\d+)")  # in Ray's message about the death of an actor
_SIGNAL = re.compile(rb"\*\*\* (SIG[A-Z]+) received")
_BY_RAY = "Ray has ended it, as the memory of its host was nearly used up (RAY_memory_usage_threshold)"
_NO_TRACE = "out of memory, killed from outside, or ended by code of yours, as os._exit does"
_WHAT_IT_MEANS = {
    "SIGILL": "SIGILL: a library used an instruction that this CPU, or this virtual machine, does not execute; set "
    "ONEDNN_MAX_CPU_ISA=AVX2 in the environment and start again",
}


def how_it_died(death: BaseException, pid: int | None = None) -> str:
    """Return why a worker process died, as words in brackets.

    Args:
        death: Ray's error, which names the process.
        pid: The process, if the error does not name it.
    """
    if isinstance(death, OutOfMemoryError):
        return _BY_RAY
    if (with_node := how_node_ended(getattr(death, "actor_id", None))) is not None:
        return with_node
    named = _PID.search(str(death))
    process = int(named[1]) if named else pid
    if process is None:
        return _NO_TRACE
    for log in _logs_of(process):
        with suppress(OSError):  # removed meanwhile
            if found := _SIGNAL.search(_end(log)):
                name = found[1].decode()
                return _WHAT_IT_MEANS.get(name, f"{name}: a fault of native code, whose stack is above")
    return _NO_TRACE


def _logs_of(pid: int) -> Iterator[Path]:
    node: Any = ray_worker._global_node
    if node is not None:
        yield from Path(node.get_logs_dir_path()).glob(f"worker-*-{pid}.err")


def _end(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - END_BYTES))
        return file.read(END_BYTES)
