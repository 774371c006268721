"""Settings of worker processes: their share of the cores, an allocator that returns freed memory, faster imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from miles.arguments.launch.host_share import threads

# glibc keeps freed blocks of up to 32 MiB in one fragmenting heap per thread. One heap, and returning blocks above
# 2 MiB at once, saves memory and costs time (docs/performance.md has the figures). glibc reads these variables when a
# process starts, so they must be in its environment.
_MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2 << 20)}


def malloc_environment(device: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables for worker processes on ``device``, without those that ``given`` already sets."""
    return {name: value for name, value in _MALLOC.items() if device == "cpu" and name not in given}


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while the block imports, and leave the imported objects out of later collections.

    Modules stay, and they have a million objects. Passing over them takes a tenth of the time of the imports, and
    0.3 s in each later full collection.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time (launch/host_share.py).

    Ray sets OMP_NUM_THREADS to the actor's logical CPUs, which are not cores here, so PyTorch's number of threads is
    set directly.
    """
    if device == "cpu":
        import torch  # not at the top: the launcher imports this module

        torch.set_num_threads(threads(sharers))
