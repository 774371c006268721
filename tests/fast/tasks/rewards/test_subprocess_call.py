import math
import os
import queue
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.tasks.rewards import subprocess_call as pool
from miles.tasks.rewards.subprocess_call import (
    MAX_CHILDREN,
    MEMORY,
    WALL_SECONDS,
    SubprocessCallTimeout,
    SubprocessDied,
    in_parallel,
    limit_time,
    subprocess_call,
)


def test_results_and_exceptions_are_returned():
    assert subprocess_call(math.gcd, 12, 18, seconds=10) == 6
    with pytest.raises(ZeroDivisionError, match="division"):
        subprocess_call(divmod, 1, 0, seconds=10)
    with pytest.raises(subprocess.CalledProcessError, match="exit status 1"):
        subprocess_call(subprocess.check_call, ["false"], seconds=10)


def test_printed_text_is_not_mistaken_for_a_reply():
    assert subprocess_call(print, "to standard error", seconds=10) is None


def test_hang_in_c_code_and_death_are_distinguished_and_survived():
    with pytest.raises(SubprocessCallTimeout, match="pow took more than 0.3 s"):
        subprocess_call(pow, 9, 9**9, seconds=0.3)
    with pytest.raises(SubprocessDied, match="died with exit code 3"):
        subprocess_call(os._exit, 3, seconds=10)
    with pytest.raises(SubprocessCallTimeout, match="sleep took more than 0.05 s"):
        subprocess_call(time.sleep, 600, seconds=0.05)
    assert subprocess_call(abs, -1, seconds=10) == 1


def test_threads_share_the_children():
    with ThreadPoolExecutor(8) as threads:
        children = set(threads.map(lambda _: subprocess_call(os.getpid, seconds=10), range(40)))
        roots = list(threads.map(lambda n: subprocess_call(math.isqrt, n * n, seconds=10), range(40)))
    assert roots == list(range(40))
    assert 1 <= len(children) <= MAX_CHILDREN and os.getpid() not in children


def test_a_worker_that_died_is_replaced_without_importing_again():
    forker = subprocess_call(os.getppid, seconds=10)
    for _ in range(3):
        with pytest.raises(SubprocessCallTimeout):
            subprocess_call(pow, 9, 9**9, seconds=0.05)
    assert subprocess_call(os.getppid, seconds=10) == forker


def test_a_process_that_cannot_be_started_takes_no_place_in_the_pool(monkeypatch):
    spares = queue.LifoQueue()
    spares.put(None)

    def no_process(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(pool, "_idle", spares)
    monkeypatch.setattr(subprocess, "Popen", no_process)
    with pytest.raises(BlockingIOError):
        subprocess_call(abs, -1, seconds=10)
    assert spares.get_nowait() is None


def test_a_call_that_waits_for_the_processor_is_not_ended():
    """Wall time beyond the limit, as on a busy machine, with little processor time."""
    assert subprocess_call(time.sleep, 1.2, seconds=1) is None


def test_memory_is_bounded():
    with pytest.raises(MemoryError):
        subprocess_call(bytearray, MEMORY, seconds=10)


def prepare_and_search(preparation, seconds, n):
    limit_time(10)
    time.sleep(preparation)
    limit_time(seconds)
    return pow(9, n)


def test_a_preparation_may_have_its_own_time():
    longer = 1.0 + WALL_SECONDS * 0.25  # than the 2 s of wall time that the call has
    assert subprocess_call(prepare_and_search, longer, 0.25, 2, seconds=0.25) == 81
    with pytest.raises(SubprocessCallTimeout):
        subprocess_call(prepare_and_search, 0, 0.2, 9**9, seconds=0.2)


def test_calls_in_parallel_keep_their_order():
    assert in_parallel(lambda n: subprocess_call(math.isqrt, n * n, seconds=10), range(30)) == list(range(30))
