"""What makes a worker fast on CPU: its share of the cores, and memory that is kept instead of given back."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

# glibc hands every large block back to the kernel and takes new, zeroed pages for the next one: a training step spends
# a third of its time in page faults. One arena and no trimming keep the memory; above 32 MiB, where reuse rarely fits
# and holes cost most, blocks still go back. Read by glibc when a process starts, so it must stand in its environment.
_KEEP_MEMORY = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


def malloc_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Variables for worker processes on ``device``; what the user has set in ``given`` stays."""
    return {name: value for name, value in _KEEP_MEMORY.items() if device == "cpu" and name not in given}


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time.

    Ray sets OMP_NUM_THREADS to an actor's CPU tickets, which says nothing of cores here; PyTorch is told directly.
    """
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
