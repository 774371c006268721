"""Forks: they begin as a new process would, share what was imported, and are signalled and awaited like processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# A sweep's process: it starts forks, which end with it.
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
from forked_work import work
from miles.commands.sweeps.run_queue import Forks

folder = Path(sys.argv[1])
start = Forks(["miles", "train"], work, ["forked_imports"])

def run(name, core):
    os.sched_setaffinity(0, {core})  # of this thread, as in the queue
    words = ["miles", "train", name, str(folder)]
    pid, wait = start(words, folder / name, {**os.environ, "NAME": name})
    if name.startswith("waits"):
        while not (folder / "ready").exists():
            pass
        os.kill(pid, 15)
    statuses[name] = wait()
if __name__ == "__main__":
    statuses = {}
    threads = [threading.Thread(target=run, args=(name, core)) for name, core in json.loads(sys.argv[2])]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(json.dumps(statuses))
"""
FORKED_IMPORTS = """
import os
IMPORTED_BY = os.getpid()
"""
FORKED_WORK = """
import json, os, signal, sys

def work(words):
    name, folder = words
    import forked_imports
    if name.startswith("waits"):
        def stop(number, frame):
            print("stopped by", number)
            sys.exit(128 + number)
        signal.signal(signal.SIGTERM, stop)
        open(f"{folder}/ready", "w").close()
        while True:
            signal.pause()
    if name.startswith("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("raises"):
        raise KeyError("gold")
    if name.startswith("refuses"):
        print("wrong flags", file=sys.stderr)
        raise SystemExit(2)
    print(json.dumps({
        "name": os.environ["NAME"],
        "cores": sorted(os.sched_getaffinity(0)),
        "session": os.getsid(0) == os.getpid(),
        "shares imports": forked_imports.IMPORTED_BY not in (os.getpid(), 0),
        "imported by": forked_imports.IMPORTED_BY,
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }))
"""


@pytest.fixture
def forks(tmp_path: Path):
    """Return ``forks(names)``: run these, and return the statuses and the logs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "forked_work.py").write_text(FORKED_WORK)
    (tmp_path / "forked_imports.py").write_text(FORKED_IMPORTS)
    cores = sorted(os.sched_getaffinity(0))
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*names: str) -> tuple[dict[str, int], dict[str, str]]:
        assignments = [(name, cores[i % len(cores)]) for i, name in enumerate(names)]
        words = [sys.executable, str(tmp_path / "program.py"), str(tmp_path), json.dumps(assignments)]
        done = subprocess.run(
            words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout), {name: (tmp_path / name).read_text() for name in names}

    return run


def test_a_fork_begins_as_a_process_would(forks) -> None:
    statuses, logs = forks("first", "second")
    assert statuses == {"first": 0, "second": 0}
    told = {name: json.loads(log) for name, log in logs.items()}
    cores = sorted(os.sched_getaffinity(0))
    for i, (name, facts) in enumerate(told.items()):
        assert facts["name"] == name, "its own environment"
        assert facts["cores"] == [cores[i % len(cores)]], "the cores of the thread that started it"
        assert facts["session"] and facts["interrupts"]
    assert told["first"]["shares imports"]
    assert told["first"]["imported by"] == told["second"]["imported by"], "imported once, for both"


def test_a_fork_ends_with_the_status_of_a_process(forks) -> None:
    statuses, logs = forks("raises", "refuses", "dies", "waits")
    assert statuses == {
        "raises": 1,
        "refuses": 2,
        "dies": -signal.SIGKILL,
        "waits": 128 + signal.SIGTERM,
    }
    assert logs["raises"].rstrip().endswith("KeyError: 'gold'")
    assert logs["refuses"] == "wrong flags\n"
    assert logs["waits"] == f"stopped by {signal.SIGTERM.value}\n"
