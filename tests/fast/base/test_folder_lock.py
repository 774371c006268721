"""Two launchers never write to one folder, on the same host or on two hosts that share it."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles.base import locks as folder_lock
from miles.base.locks import HEARTBEAT_SECONDS, NAME, STALE_SECONDS, is_held, locked_folders

REPO = Path(__file__).resolve().parents[3]
HOLD = """
import sys
from pathlib import Path
from miles.base.locks import locked_folders
with locked_folders([("--save", Path(sys.argv[1]))]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_launcher(tmp_path):
    """Start a process that holds the lock of ``tmp_path`` until it is stopped or killed."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def lock(folder):
    return locked_folders([("--save", folder)])


def test_a_second_launcher_is_refused_and_the_first_is_named(tmp_path, other_launcher):
    named = rf"--save {tmp_path}: .*process {other_launcher.pid} on .*; wait for it"
    with pytest.raises(ValueError, match=named), lock(tmp_path):
        pass


def test_the_lock_of_a_killed_launcher_is_free_at_once(tmp_path, other_launcher):
    other_launcher.kill()
    other_launcher.wait()
    with lock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_lock_that_is_released_leaves_no_file(tmp_path):
    with lock(tmp_path / "new"):
        assert (tmp_path / "new" / NAME).is_file()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("other", ["hf", "link", "./hf/"])
def test_two_runs_do_not_write_one_export(tmp_path, other):
    (tmp_path / "link").symlink_to(tmp_path / "hf")
    with locked_folders([], str(tmp_path / "hf")) as locks:
        assert (tmp_path / ".miles-lock-hf").is_file() and not (tmp_path / "hf").exists()
        locks.check()
        refused = pytest.raises(ValueError, match="--save-hf .*: another run is writing to this folder")
        with refused, locked_folders([], f"{tmp_path}/{other}"):
            pass
        with locked_folders([], str(tmp_path / "hf2")):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_the_lock_of_numbered_exports_is_outside_of_all_of_them(tmp_path):
    with locked_folders([], str(tmp_path / "new" / "step-{iteration}" / "hf")):
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".miles-lock-step-{iteration}-hf"]


@pytest.mark.parametrize("name", ["n" * 240, "{iteration}-" + "n" * 220 + "/" + "m" * 220])
def test_an_export_of_a_long_name_has_a_lock(tmp_path, name):
    with locked_folders([], str(tmp_path / name)):
        (lock,) = tmp_path.iterdir()
        assert len(f"{lock.name}.{'0' * 32}") <= 255, "another launcher's clock file has this name"
        with pytest.raises(ValueError, match="another run is writing"), locked_folders([], str(tmp_path / name)):
            pass


def test_both_placeholders_name_the_same_exports(tmp_path):
    refused = pytest.raises(ValueError, match="another run is writing")
    with locked_folders([], str(tmp_path / "{iteration}")), refused, locked_folders([], str(tmp_path / "{rollout_id}")):
        pass


ENDS_AT_ONCE = """
import sys
from pathlib import Path
from miles.base.locks import locked_folders
from miles.run import session

class Guard:
    def close(self):
        return sys.argv[2] == "True"

with locked_folders([("--save", Path(sys.argv[1], "a")), ("--output-dir", Path(sys.argv[1], "b"))]):
    Path(sys.argv[1], "b", ".miles-lock").write_text("of another launcher")
    session.end_at_once(Guard() if sys.argv[2] else None, 3)
"""


@pytest.mark.parametrize("has_ended", ["True", "False", ""])
def test_a_launcher_that_ends_at_once_releases_its_lock_if_nothing_of_its_run_is_left(tmp_path, has_ended):
    ended = subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path), has_ended], cwd=REPO, timeout=60)
    assert ended.returncode == 3
    assert (tmp_path / "a" / NAME).exists() == (has_ended != "True")
    assert (tmp_path / "b" / NAME).read_text() == "of another launcher"


def test_a_file_system_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(folder_lock, "RELEASE_SECONDS", 0.05)
    with lock(tmp_path):
        monkeypatch.setattr(folder_lock, "_remove", lambda path, record: over.wait())
        folder_lock.release_at_end()
        monkeypatch.undo()
        over.set()


def test_other_folders_are_not_affected(tmp_path, other_launcher):
    with lock(tmp_path / "other"):
        pass


def test_one_folder_under_two_flags_is_locked_once(tmp_path):
    with locked_folders([("--output-dir", tmp_path), ("--save", tmp_path / "x" / ".."), ("--save", tmp_path)]):
        pass


@pytest.fixture
def lock_of_another_host(tmp_path):
    """Write a lock as held by a launcher on another host, which this host's kernel does not know."""
    record = {"host": "elsewhere", "pid": 17, "started": "2026-01-01 00:00:00", "id": "x"}
    (tmp_path / NAME).write_text(json.dumps(record))
    return tmp_path / NAME


def test_a_launcher_on_another_host_is_seen_by_its_heartbeat(tmp_path, lock_of_another_host):
    with pytest.raises(ValueError, match="process 17 on elsewhere, since 2026-01-01"), lock(tmp_path):
        pass


def test_a_lock_is_alive_until_several_heartbeats_are_missing():
    assert STALE_SECONDS == 60 >= 3 * HEARTBEAT_SECONDS


def test_a_lock_without_heartbeat_is_taken_over(tmp_path, lock_of_another_host):
    last_beat = lock_of_another_host.stat().st_mtime - STALE_SECONDS - 1
    os.utime(lock_of_another_host, (last_beat, last_beat))
    with lock(tmp_path):
        assert json.loads(lock_of_another_host.read_text())["pid"] == os.getpid()


def test_the_owner_keeps_its_lock_alive_and_stops_once_it_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.01)
    with lock(tmp_path):
        path = tmp_path / NAME
        os.utime(path, (1.0, 1.0))
        while path.stat().st_mtime == 1.0:
            pass
        taken = json.dumps({"host": "elsewhere", "pid": 17, "started": "now", "id": "y"})
        path.write_text(taken)
    assert path.read_text() == taken, "a lock that another launcher has taken over is not removed"


def test_a_lock_that_cannot_be_read_once_stays_alive(tmp_path, monkeypatch):
    """As on a network's file system."""
    monkeypatch.setattr(folder_lock, "HEARTBEAT_SECONDS", 0.01)
    faults, read = [OSError(5, "Input/output error")], Path.read_text

    def read_text(path):
        if path.name == NAME and faults:
            raise faults.pop()
        return read(path)

    with lock(tmp_path):
        monkeypatch.setattr(Path, "read_text", read_text)
        while faults:
            pass
        os.utime(tmp_path / NAME, (1.0, 1.0))
        while (tmp_path / NAME).stat().st_mtime == 1.0:
            pass


def test_a_launcher_whose_folder_was_taken_over_writes_no_more(tmp_path):
    """As after a stop for longer than the heartbeat may be missing, on a folder that two hosts share."""
    with lock(tmp_path) as held:
        held.check()
        taken = json.dumps({"host": "elsewhere", "pid": 17, "started": "now", "id": "y"})
        (tmp_path / NAME).write_text(taken)
        with pytest.raises(ValueError, match=f"^--save {tmp_path}: process 17 on elsewhere, since now has taken this"):
            held.check()


def test_a_launcher_whose_lock_was_removed_writes_no_more(tmp_path):
    with lock(tmp_path) as held:
        (tmp_path / NAME).unlink()
        with pytest.raises(ValueError, match=f"^--save {tmp_path}: the lock {NAME} of this run was removed"):
            held.check()


def test_a_half_written_lock_is_ignored(tmp_path):
    (tmp_path / NAME).write_text('{"host": "els')
    with lock(tmp_path):
        pass


@pytest.fixture
def unreadable(monkeypatch):
    """Make every read of a lock fail, as on a network's file system; root may read any file."""
    read = Path.read_text

    def read_text(path, *args, **named):
        if path.name == NAME:
            raise OSError(5, "Input/output error")
        return read(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_the_lock_of_a_launcher_is_held_until_it_ends(tmp_path, other_launcher):
    assert is_held(tmp_path)
    other_launcher.kill()
    other_launcher.wait()
    assert not is_held(tmp_path) and not is_held(tmp_path / "missing") and not is_held(tmp_path / NAME)


def test_a_lock_that_cannot_be_read_is_held_while_it_has_a_heartbeat(tmp_path, lock_of_another_host, unreadable):
    assert is_held(tmp_path)
    os.utime(lock_of_another_host, (1.0, 1.0))
    assert not is_held(tmp_path)


def test_a_lock_that_is_being_written_is_held(tmp_path):
    (tmp_path / NAME).touch()
    assert is_held(tmp_path)


def test_a_lock_of_which_nothing_can_be_found_out_is_held(tmp_path, monkeypatch):
    def stat(path, **_):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "stat", stat)
    assert is_held(tmp_path)


def test_a_lock_that_cannot_be_read_is_not_taken(tmp_path, lock_of_another_host, unreadable):
    before = lock_of_another_host.read_bytes()
    fault = rf"^--save {tmp_path}: the lock {NAME} cannot be read \(Input/output error\), so another run may"
    with pytest.raises(ValueError, match=fault), lock(tmp_path):
        pass
    assert lock_of_another_host.read_bytes() == before


def test_a_lock_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    def full(path, record):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_lock, "_write", full)
    with pytest.raises(ValueError, match="cannot be written"), lock(tmp_path):
        pass
    assert not is_held(tmp_path)
