"""What makes a worker fast on CPU: its share of the cores; and small: memory that is given back."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

# glibc keeps blocks of up to 32 MiB in a heap that fragments: a trainer of 135M parameters grows from 4.4 to 5.3 GB by
# it. Blocks above 1 MiB go back to the kernel as they are freed; huge pages make taking them anew cheaper. Both
# variables are read when a process starts, so they must stand in its environment.
_RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "THP_MEM_ALLOC_ENABLE": "1"}


def malloc_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Variables for worker processes on ``device``; what the user has set in ``given`` stays."""
    return {name: value for name, value in _RETURN_MEMORY.items() if device == "cpu" and name not in given}


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time.

    Ray sets OMP_NUM_THREADS to an actor's CPU tickets, which says nothing of cores here; PyTorch is told directly.
    """
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
