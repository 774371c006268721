"""The stacks of another process, whatever it is doing, and without harm to a process that knows nothing of it."""

import os
import signal
import subprocess
import sys

import psutil
import pytest

from miles.base import stacks
from miles.base.processes import RUN_FOLDER
from miles.base.stacks import frames, request_stacks

WORK = """
import re, sys, time
from miles.base.stacks import answer_requests

def hold_the_lock():
    print("ready", flush=True)
    re.match(r"(a|a)*$", "a" * 60 + "b")  # backtracks for years, and lets no other thread run

def wait_in_python():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

answer_requests()
globals()[sys.argv[1]]()
"""


@pytest.fixture
def working(tmp_path):
    """Return ``working(function)``: a process of a run that is in that function."""
    processes = []

    def start(function):
        environment = {**os.environ, RUN_FOLDER: str(tmp_path)}
        command = [sys.executable, "-c", WORK, function]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout.readline() == "ready\n"
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_stacks_of_processes_that_hold_the_lock_wait_or_are_stopped(working, tmp_path):
    holds, waits, stopped = working("hold_the_lock"), working("wait_in_python"), working("wait_in_python")
    stopped.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    for _ in range(2):  # the second time, the answers follow the first ones
        answers = request_stacks(tmp_path, [holds.pid, waits.pid, stopped.pid], seconds=60)
        names = {pid: [name for thread in frames(text) for _, _, name in thread] for pid, text in answers.items()}
        assert names[holds.pid][-2:] == ["hold_the_lock", "<module>"]
        assert names[waits.pid] == names[stopped.pid] == ["wait_in_python", "<module>"]


def test_a_process_without_the_handler_is_left_alone(tmp_path):
    (tmp_path / "stacks").mkdir()
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        (tmp_path / "stacks" / str(process.pid)).touch()  # of an earlier process with the same number
        assert request_stacks(tmp_path, [process.pid, 2**22 + 1], seconds=60) == {}
        assert psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        process.kill()


def test_own_stacks_include_the_caller():
    assert any(name == "own_stacks" for thread in frames(stacks.own_stacks()) for _, _, name in thread)
