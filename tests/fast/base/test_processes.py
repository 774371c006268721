"""A pool's processes end with the process that made it, however that ends."""

import signal
import subprocess
import sys

import psutil
import pytest

POOL = """
import os, sys, time
from miles.base.processes import pool_of
if __name__ == "__main__":
    pool = pool_of(2, sys.argv[1])
    print(*{pool.submit(os.getpid).result() for _ in range(20)}, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("name", ["KILL", "TERM"])
def test_waiting_workers_end_with_a_killed_parent(tmp_path, method, name):
    program = tmp_path / "pool.py"
    program.write_text(POOL)
    with subprocess.Popen([sys.executable, program, method], stdout=subprocess.PIPE, text=True) as parent:
        workers = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert workers and all(worker.is_running() for worker in workers)
        parent.send_signal(signal.Signals[f"SIG{name}"])
        parent.wait(60)
        _, left = psutil.wait_procs(workers, 60)
        for worker in left:
            worker.kill()
    assert not left
