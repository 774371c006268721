"""The guard kills and removes everything that a run leaves, and nothing else. Starts no Ray."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles.base.processes import RUN_FOLDER
from miles.engine.servers.leftovers import NOTED, SEGMENTS, begin_notes, note_segments, remove_segments
from miles.run.run_guard import LOCK, RunGuard, clean_up, mark_of, remove_stale
from miles.run.stop_requests import STOPS

SHARED_MEMORY = Path("/dev/shm")

# A launcher with a guard and three processes of its run. Two hide: they have an empty environment, as after a change of
# the title, and one of them has lost its parent and is in a separate session.
LAUNCHER = """
import psutil, subprocess, sys
from pathlib import Path
from miles.run.run_guard import RunGuard

if "unmarked" in sys.argv:
    psutil.Process().rlimit(psutil.RLIMIT_LOCKS, (5, 5))
guard = RunGuard(Path(sys.argv[1]))
hidden = "import subprocess, time; print(subprocess.Popen(['/bin/sleep', '600'], env={}).pid, flush=True); "
hidden += "time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", hidden], stdout=subprocess.PIPE, text=True)
orphan = "import subprocess as s; "
orphan += "print(s.Popen(['/bin/sleep', '600'], env={}, stdout=s.DEVNULL, start_new_session=True).pid)"
lost = subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE).stdout
print(guard.pid, child.pid, int(child.stdout.readline()), int(lost), guard.folder, flush=True)
input()
"""


def have_ended(processes, seconds=5.0):
    """Return whether the processes end within this time. Whoever is their parent may not have reaped them yet."""
    until = time.monotonic() + seconds
    while left := [process for process in processes if lives(process)]:
        if time.monotonic() > until:
            return False
        psutil.wait_procs(left, timeout=0.05)
    return True


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def started(tmp_path, request):
    """Start the launcher; return it, the guard, the processes of its run, and its folder."""
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path), getattr(request, "param", "")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as launcher:
        guard, *pids, folder = launcher.stdout.readline().split()
        run = [psutil.Process(int(pid)) for pid in (guard, *pids)]
        yield launcher, run, folder
        launcher.kill()
        for process in run:
            if process.is_running():
                process.kill()


OF_ENGINE = """
import subprocess, sys
from pathlib import Path
from miles.run.run_guard import RunGuard

guard = RunGuard(Path(sys.argv[1]), is_detached=True)
print(guard.folder, subprocess.Popen(["/bin/sleep", "600"]).pid, flush=True)
input()
"""


def test_the_guard_of_an_engine_outlives_the_children_that_ray_kills_with_their_worker(tmp_path):
    command = [sys.executable, "-c", OF_ENGINE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        folder, pid = worker.stdout.readline().split()
        children = psutil.Process(worker.pid).children(recursive=True)
        assert [child.pid for child in children] == [int(pid)]
        worker.kill()
    try:
        assert have_ended(children), "the guard has killed what was left"
        until = time.monotonic() + 30.0
        while os.path.exists(folder):
            assert time.monotonic() < until, "the guard did not remove the folder"
            time.sleep(0.05)
    finally:
        for child in children:
            if child.is_running():
                child.kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, *STOPS])
def test_nothing_is_left_when_the_launcher_is_killed(started, number):
    launcher, run, folder = started
    other = f"import psutil, time; psutil.Process().rlimit(psutil.RLIMIT_LOCKS, ({mark_of(folder + 'x')}, -1)); "
    other += "print(flush=True); time.sleep(600)"
    environment = {**os.environ, RUN_FOLDER: folder + "x"}
    bystander = subprocess.Popen([sys.executable, "-c", other], env=environment, stdout=subprocess.PIPE)
    bystander.stdout.readline()
    try:
        assert os.path.exists(folder)
        launcher.send_signal(number)
        assert have_ended(run) and not os.path.exists(folder)
        assert bystander.poll() is None, "a process of another run was killed"
    finally:
        bystander.kill()
        bystander.wait()


def test_signals_to_all_processes_of_a_terminal_leave_the_guard_to_its_work(started):
    launcher, (guard, *run), folder = started
    for number in STOPS:
        guard.send_signal(number)
    launcher.kill()
    assert have_ended([guard, *run]) and not os.path.exists(folder)


def test_the_next_run_removes_what_is_left_if_the_guard_was_killed_too(started, tmp_path):
    launcher, (guard, *run), folder = started
    remove_stale(tmp_path)
    assert os.path.exists(folder), "the run is alive"
    guard.kill()
    assert have_ended([guard])
    remove_stale(tmp_path)
    assert os.path.exists(folder) and all(map(lives, run)), "the launcher is alive"
    launcher.kill()
    launcher.wait()
    assert all(map(lives, run))
    following = RunGuard(tmp_path)
    try:
        assert have_ended(run) and not os.path.exists(folder)
        assert following.folder.exists() and os.environ[RUN_FOLDER] == str(following.folder)
    finally:
        assert following.close()
    assert not following.folder.exists() and RUN_FOLDER not in os.environ


@pytest.mark.parametrize("started", ["unmarked"], indirect=True)
def test_where_no_mark_can_be_set_descent_from_a_process_with_the_environment_counts(started):
    launcher, (*run, lost), folder = started
    launcher.kill()
    assert have_ended(run) and not os.path.exists(folder) and lives(lost)


def test_a_launcher_whose_guard_was_killed_cleans_up_itself(tmp_path):
    limits = psutil.Process().rlimit(psutil.RLIMIT_LOCKS)
    guard = RunGuard(tmp_path)
    left = subprocess.Popen(["/bin/sleep", "600"], env={})
    try:
        psutil.Process(guard.pid).kill()
        assert have_ended([psutil.Process(guard.pid)])
        assert guard.close() and not psutil.pid_exists(left.pid) and not guard.folder.exists()
    finally:
        left.kill()
    assert psutil.Process().rlimit(psutil.RLIMIT_LOCKS) == limits


# The pipe to the guard closes while the launcher is still there, as at the end of Python.
DROPS = """
import subprocess, sys
from pathlib import Path
from miles.run.run_guard import RunGuard

guard = RunGuard(Path(sys.argv[1]))
child = subprocess.Popen(["/bin/sleep", "600"], env={})
guard._process.stdin.close()
child.wait()
guard._process.wait()
sys.exit(7)
"""


def test_a_launcher_that_ends_without_closing_its_guard_has_its_own_status(tmp_path):
    """A signal in the last moment can prevent that. The guard ends the child, and not the launcher."""
    assert subprocess.run([sys.executable, "-c", DROPS, str(tmp_path)], timeout=60).returncode == 7


def test_a_folder_that_is_locked_or_not_of_a_run_stays(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    with (tmp_path / "mine" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_stale(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize("segments", SEGMENTS)
def test_only_segments_that_the_server_has_open_are_removed(tmp_path, segments):
    mine, other = (f"{segments}test_{os.getpid()}_{name}" for name in ("mine", "other"))
    hold = f"import sys; file = open({mine!r}, 'w'); print(flush=True); input()"
    open(other, "w").close()
    try:
        with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            server.stdout.readline()
            (tmp_path / "engine").mkdir()
            begin_notes(tmp_path / "engine")
            note_segments(server.pid, tmp_path / "engine")
            server.kill()
        note_segments(server.pid, tmp_path / "engine")  # a server that has ended keeps what was noted
        remove_segments(tmp_path)
        assert not os.path.exists(mine) and os.path.exists(other)
        (tmp_path / "engine" / NOTED).write_text(other)  # killed while it was written: no end of the line
        remove_segments(tmp_path)
        assert os.path.exists(other)
    finally:
        os.unlink(other)


def test_a_folder_or_binary_file_with_the_name_of_the_notes_keeps_nothing_from_being_removed(tmp_path):
    (tmp_path / "run" / "package" / NOTED).mkdir(parents=True)
    (tmp_path / "run" / NOTED).write_bytes(b"\xff\n")
    assert clean_up(tmp_path / "run")
    assert not (tmp_path / "run").exists()


SHARES_A_TENSOR = """
import sys, torch
torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.ones(1000).share_memory_()
print("shared", flush=True)
sys.stdin.read()
"""


def test_a_tensor_in_shared_memory_is_removed(tmp_path):
    """Its process and PyTorch's own, which would remove it, are killed at the same time."""
    command, environment = [sys.executable, "-c", SHARES_A_TENSOR], {**os.environ, RUN_FOLDER: str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "shared\n"
        name = f"torch_{process.pid}_*"
        assert list(SHARED_MEMORY.glob(name))
        clean_up(tmp_path)
    assert not list(SHARED_MEMORY.glob(name))
