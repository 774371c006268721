"""How worker processes import and compute on CPU."""

import gc
import os
import subprocess
import sys

import pytest

from miles.base.host import GIB
from miles.run.cpu_tuning import importing, malloc_environment


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_during_imports_and_what_they_made_is_not_passed_over_later(was_enabled):
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[] for _ in range(1000)]
        assert gc.isenabled() == was_enabled
        assert gc.get_freeze_count() >= 1000
        assert not any(each is made for each in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.enable()


def test_memory_is_kept_where_there_is_plenty_unless_the_environment_says_otherwise():
    assert malloc_environment("cuda", {}, 64 * GIB) == {}
    small, large = (malloc_environment("cpu", {}, size * GIB) for size in (15, 32))
    assert int(small["MALLOC_MMAP_THRESHOLD_"]) == 2 << 20 and "MALLOC_TRIM_THRESHOLD_" not in small
    assert int(large["MALLOC_TRIM_THRESHOLD_"]) == 4 * GIB < int(large["MALLOC_MMAP_THRESHOLD_"])
    variables = {"MALLOC_TRIM_THRESHOLD_": "1"}
    assert malloc_environment("cpu", variables, 32 * GIB) == {k: v for k, v in large.items() if k not in variables}


def test_a_freed_block_is_kept_by_a_process_with_this_environment():
    """The resident memory of a process that has freed a block; glibc reads the variables when the process starts."""
    code = (
        "import ctypes; from miles.base.host import resident_bytes as size\n"
        "libc = ctypes.CDLL(None); libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "block = libc.malloc(64 << 20); ctypes.memset(block, 1, 64 << 20); libc.free(block); print(size() >> 20)"
    )

    def resident(memory: int) -> int:
        environment = {**os.environ, **malloc_environment("cpu", {}, memory)}
        return int(
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        )

    assert resident(32 * GIB) >= resident(8 * GIB) + 60
