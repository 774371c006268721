"""The files that are kept of a failure: their bounds, their permissions, and no secret in them."""

import os
import signal
import stat
import subprocess
import sys

import psutil
import pytest

from miles.base.processes import RUN_FOLDER
from miles.run import failure_files
from miles.run.failure_files import FailureFiles, collective_in

STUCK = """
import time
from miles.base.stacks import answer_requests

def stuck_rank():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

answer_requests()
stuck_rank()
"""
IN_ALL_REDUCE = """Thread 0x00007f (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3081 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/checkout/miles/training/fsdp/runner.py", line 61 in reduce_sums
  File "/checkout/miles/training/trainer.py", line 90 in train

Thread 0x00007e (most recent call first):
  File "/checkout/miles/cluster/train_actor.py", line 250 in heartbeat
"""


@pytest.fixture
def session(tmp_path):
    """Return the temporary folder of a run, with logs of Ray in it."""
    logs = tmp_path / "run" / "session_2026-11-22_1" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("the raylet has token sesame-of-ray\n")
    (logs / "worker-1.err").write_text("HOME=/x\nPASSWORD=swordfish\n")
    (logs / "empty.out").touch()
    (logs / "zebra.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    return tmp_path / "run"


def files_of(tmp_path, session):
    files = FailureFiles(tmp_path / "out", ["sesame-of-ray"])
    files.run_folder = session
    return files


def test_logs_are_copied_without_secrets_for_their_user_alone(tmp_path, session, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "swordfish")
    monkeypatch.setenv("MY_PROXY", "http://me:open-up@host")
    (next(session.glob("*/logs")) / "worker-1.err").write_text(
        "HOME=/x\nPASSWORD=swordfish\nMY_PROXY=http://me:open-up@host\n"
    )
    files = files_of(tmp_path, session)
    files.keep_ray_logs()
    (made,) = (tmp_path / "out").glob("failure-*")
    copies = {path.name: path for path in (made / "ray_logs").iterdir()}
    assert copies.keys() == {"raylet.out", "worker-1.err", "zebra.log"}
    assert copies["raylet.out"].read_text() == "the raylet has token (hidden)\n"
    assert copies["worker-1.err"].read_text() == "HOME=/x\nPASSWORD=(hidden)\nMY_PROXY=http://me:(hidden)@host\n"
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in copies.values()} == {0o600}
    assert files.in_words() == f"; Ray's logs are in {made / 'ray_logs'}"


def test_the_copies_are_bounded_and_what_says_most_comes_first(tmp_path, session, monkeypatch):
    monkeypatch.setattr(failure_files, "FILE_BYTES", 100)
    monkeypatch.setattr(failure_files, "TOTAL_BYTES", 120)
    files_of(tmp_path, session).keep_ray_logs()
    copies = {path.name: path.read_text() for path in tmp_path.glob("out/failure-*/ray_logs/*")}
    assert "raylet.out" in copies and "worker-1.err" in copies
    assert sum(map(len, copies.values())) <= 120
    assert all(
        text.endswith("line 999\n") and text.startswith("line ") for n, text in copies.items() if n == "zebra.log"
    )


def test_only_the_newest_folders_stay(tmp_path, session):
    for number in range(7):
        (tmp_path / "out" / f"failure-20200101-00000{number}").mkdir(parents=True)
    users = tmp_path / "out" / "failure-analysis"
    users.mkdir()
    files_of(tmp_path, session).keep_ray_logs()
    names = sorted(path.name for path in (tmp_path / "out").glob("failure-2*"))
    assert users.is_dir()
    assert len(names) == failure_files.MOST_FOLDERS and names[0] == "failure-20200101-000003"


def test_a_report_has_the_stack_and_state_of_a_stopped_process_and_the_ends_of_logs(
    tmp_path, session, capsys, monkeypatch
):
    monkeypatch.setenv("MY_PASSWORD", "swordfish")
    engines = tmp_path / "out" / "engines"
    engines.mkdir(parents=True)
    (engines / "engine_0.log").write_text("first\n" * 100 + "#running-req: 3 with sesame-of-ray, swordfish\n")
    environment = {**os.environ, RUN_FOLDER: str(session)}
    with subprocess.Popen([sys.executable, "-c", STUCK], env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            files = files_of(tmp_path, session)
            files.report_hang("trainer rank 1 has shown no sign of life", ask_ray=False)
            files.report_hang("a consequence of it", ask_ray=False)
        finally:
            process.kill()
    (path,) = tmp_path.glob("out/failure-*/hang_report.txt")
    report = path.read_text()
    assert "Why: trainer rank 1 has shown no sign of life" in report and "consequence" not in report
    assert f"(process {process.pid}, {psutil.STATUS_STOPPED}," in report and "in stuck_rank" in report
    assert "the launcher" in report and "test_a_report_has_the_stack" in report
    assert "#running-req: 3 with (hidden), (hidden)" in report and report.splitlines().count("first") == 29
    assert str(path) in files.in_words() and str(path) in capsys.readouterr().err


def test_a_run_that_went_on_after_a_hang_reports_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(failure_files, "hang_report", lambda why, *arguments: why)
    files = FailureFiles(tmp_path / "out", [])
    files.report_hang("the first")
    files.next_attempt()  # the worker was replaced
    files.report_hang("the second")
    (*_, path) = sorted(tmp_path.glob("out/failure-*/hang_report.txt"))
    assert path.read_text() == "the second"


def test_all_calls_of_py_spy_share_one_deadline(tmp_path, monkeypatch):
    now, limits = [0.0], []

    def run(command, timeout, **options):
        limits.append(timeout)
        now[0] += 15.0
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(failure_files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(failure_files.subprocess, "run", run)
    monkeypatch.setattr(failure_files.shutil, "which", lambda program: program)
    until = failure_files.PY_SPY_SECONDS
    for _ in range(3):
        assert failure_files._by_py_spy(failure_files._Process("a scheduler", 1, "", ""), until) == ""
    assert limits == [20.0, 5.0]


def test_the_collective_of_a_rank_is_named_with_its_caller():
    assert collective_in(IN_ALL_REDUCE) == "all_reduce, called at miles/training/fsdp/runner.py:61 in reduce_sums"
    assert collective_in(IN_ALL_REDUCE.partition("Thread 0x00007e")[2]) is None
