"""The tests of runs find every process of a run, whatever it does to hide. Starts no Ray."""

import time

from tests.fast.run.runs.launches import Launch

# Ends at once. A process in a separate session stays, whose title is written over its environment, as Ray does it.
HIDES = """
import os, sys
if os.fork() == 0:
    os.setsid()
    import ray, time
    ray._raylet.setproctitle("ray::Hidden")
    open(sys.argv[-1] + "/hidden", "w").write(str(os.getpid()))
    time.sleep(600)
"""


def test_a_process_that_hides_is_left(tmp_path):
    (tmp_path / "hides.py").write_text(HIDES)
    (tmp_path / "ends.py").write_text("")
    run, other = (Launch(tmp_path / name, [], tmp_path / f"{name}.py") for name in ("hides", "ends"))
    try:
        assert run.process.wait() == other.process.wait() == 0
        (hidden,) = run.left()
        while not (tmp_path / "hides" / "hidden").exists():
            time.sleep(0.05)
        assert (tmp_path / "hides" / "hidden").read_text() == str(hidden.pid)
        assert not run.none_left(0) and not hidden.environ() and hidden.pid != run.process.pid
        assert other.none_left(0) and other.left() == []
    finally:
        run.kill()
        other.kill()
    assert run.none_left(0) and not hidden.is_running()
