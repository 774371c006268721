"""Settings of worker processes: their share of the cores, the memory that their allocator keeps, faster imports."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from miles.base.host import GIB, memory_bytes
from miles.base.quick_import import import_transformers_quickly
from miles.config.host_share import threads

_PLENTY = 16 * GIB  # of memory: enough to keep some for speed
_LARGE_BLOCK = 2 << 20


def malloc_environment(device: str, environment: Mapping[str, str], memory: int | None = None) -> dict[str, str]:
    """Return environment variables for worker processes on ``device``, without those that ``environment`` already sets.

    By default glibc returns large blocks to the kernel when they are freed, which clears their pages for the next
    allocation: a fifth of the time of a training pass (docs/performance.md has the figures). A host with plenty of
    memory lets each process keep an eighth of it. On others, blocks above 2 MiB are returned. One heap instead of one
    per thread wastes less in either case. glibc reads the variables when a process starts.

    Args:
        device: Of the workers; nothing is set for CUDA.
        environment: The variables that are set.
        memory: Bytes that this host may use; by default they are looked up.
    """
    if device != "cpu":
        return {}
    memory = memory_bytes() if memory is None else memory
    wanted = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(_LARGE_BLOCK)}
    if memory >= _PLENTY:
        wanted |= {"MALLOC_MMAP_THRESHOLD_": str(memory), "MALLOC_TRIM_THRESHOLD_": str(memory // 8)}
    return {name: value for name, value in wanted.items() if name not in environment}


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while the block imports, and leave the imported objects out of later collections.

    Modules stay, and they have a million objects. Passing over them takes a tenth of the time of the imports, and
    0.3 s in each later full collection.
    """
    import_transformers_quickly()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def use_threads(device: str, sharers: int) -> None:
    """On CPU, split the cores over the ``sharers`` processes that compute at the same time (config/host_share.py).

    Ray sets OMP_NUM_THREADS to the actor's logical CPUs, which are not cores here, so PyTorch's number of threads is
    set directly.
    """
    if device == "cpu":
        import torch  # not at the top: the launcher imports this module

        torch.set_num_threads(threads(sharers))
