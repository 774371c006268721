import math
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles.rewards.subprocess_call import MAX_CHILDREN, SubprocessCallTimeout, subprocess_call


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
    with pytest.raises(RuntimeError, match="died with exit code 3"):
        subprocess_call(os._exit, 3, seconds=10)
    assert subprocess_call(abs, -1, seconds=10) == 1


def test_threads_share_the_children():
    with ThreadPoolExecutor(8) as threads:
        children = set(threads.map(lambda _: subprocess_call(os.getpid, seconds=10), range(40)))
        roots = list(threads.map(lambda n: subprocess_call(math.isqrt, n * n, seconds=10), range(40)))
    assert roots == list(range(40))
    assert 1 <= len(children) <= MAX_CHILDREN and os.getpid() not in children
