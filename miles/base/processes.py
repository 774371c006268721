"""End processes of this machine."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

import psutil


def kill_all(processes: Collection[psutil.Process], seconds: float) -> set[int]:
    """Kill the processes, and wait up to ``seconds`` until they have ended; return the ids of those that it killed."""
    killed: set[int] = set()
    for process in processes:
        with suppress(psutil.Error):  # it has ended meanwhile
            process.kill()
            killed.add(process.pid)
    psutil.wait_procs(processes, timeout=seconds)
    return killed
