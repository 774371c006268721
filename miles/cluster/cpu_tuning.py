"""Settings of worker processes on CPU: their share of the cores, and an allocator that returns freed memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

# glibc keeps freed blocks of up to 32 MiB in one fragmenting heap per thread. One heap, and returning blocks above
# 2 MiB at once, saves memory and costs time (docs/performance.md has the figures). glibc reads these variables when a
# process starts, so they must be in its environment.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2 << 20)}


def malloc_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for worker processes on ``device``, without those that ``given`` already sets."""
    return {name: value for name, value in _MALLOC.items() if device == "cpu" and name not in given}


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time.

    Ray sets OMP_NUM_THREADS to the actor's logical CPUs, which are not cores here, so PyTorch's number of threads is
    set directly.
    """
    if device == "cpu":
        import torch  # not at the top: the launcher imports this module

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
