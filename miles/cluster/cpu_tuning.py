"""Workers on CPU: their share of the cores, and memory that goes back when it is freed."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

# glibc keeps freed blocks of up to 32 MiB, in a heap a thread that fragments. With one heap, and blocks above 2 MiB
# given back as they are freed, memory is bought with time (docs/performance.md has both). Read when a process starts,
# so it must stand in its environment.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2 << 20)}


def malloc_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Variables for worker processes on ``device``; what the user has set in ``given`` stays."""
    return {name: value for name, value in _MALLOC.items() if device == "cpu" and name not in given}


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time.

    Ray sets OMP_NUM_THREADS to an actor's CPU tickets, which says nothing of cores here; PyTorch is told directly.
    """
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
