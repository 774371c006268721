"""One launcher writes a remote folder: a live launcher's lock is respected, a dead launcher's lock is taken over."""

import json
import os
import threading

import pytest

from miles.base import locks
from miles.base.locks import NAME, RemoteLock, is_locked
from miles.base.storage import RemoteFolder
from tests.fast.support.failing_storage import register


@pytest.fixture
def folder(tmp_path):
    register(tmp_path)
    return RemoteFolder("failing://run", pauses=[])


def leave(folder, **changes):
    """Leave the lock of a launcher of this host that has died, with changes."""
    with RemoteLock(folder, "--save x"):
        record = json.loads(folder.read(NAME))
    folder.write(NAME, json.dumps(record | changes).encode())


def test_a_second_launcher_is_refused_until_the_first_ends(folder):
    with RemoteLock(folder, "--save x") as lock:
        assert lock.is_held() and is_locked(folder)
        with pytest.raises(ValueError, match=f"--save x: another run is writing .*process {os.getpid()} on .*; wait"):
            RemoteLock(folder, "--save x").__enter__()
        assert lock.is_held()
    assert folder.files() == {} and not is_locked(folder)


def test_the_lock_of_a_dead_process_of_this_host_is_taken_over_at_once(folder):
    for changes in ({"pid": 2**22 - 1}, {"process_started": 1.0, "pid": os.getppid()}, {}):  # the last: exec
        leave(folder, **changes)
        with RemoteLock(folder, "--save x", stale_seconds=600) as lock:
            assert lock.is_held()


def test_the_lock_of_another_host_is_taken_over_when_it_does_not_change(folder, capsys):
    leave(folder, host="elsewhere")
    with RemoteLock(folder, "--save x", stale_seconds=0.05) as lock:
        assert lock.is_held()
    assert "on elsewhere, since" in capsys.readouterr().out


def test_another_host_that_shows_that_it_is_alive_is_respected(folder):
    leave(folder, host="elsewhere")
    storage = register(folder._system[0].root)
    reads = []

    def before(verb, path):
        if verb == "cat":
            reads.append(path)
            if len(reads) == 2:
                file = storage.root / path
                file.write_text(json.dumps(json.loads(file.read_text()) | {"beat": 1}))

    storage.before = staticmethod(before)
    with pytest.raises(ValueError, match="on elsewhere"):
        RemoteLock(folder, "--save x", stale_seconds=0.05).__enter__()


def test_a_launcher_sees_that_its_lock_was_taken_over(folder):
    with RemoteLock(folder, "--save x") as lock:
        folder.write(NAME, folder.read(NAME).replace(lock._record["id"].encode(), b"other"))
        assert not lock.is_held()
    assert NAME in folder.files(), "it is not ours to remove"


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(folder):
    def before(verb, path):
        raise PermissionError("denied")

    register(folder._system[0].root).before = staticmethod(before)
    with pytest.raises(ValueError, match="--save x: failing://run: .*cannot be written .*denied.*credentials"):
        RemoteLock(folder, "--save x").__enter__()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"host": 1}', b"\xff"])
def test_a_file_that_is_no_lock_locks_nothing(folder, content):
    folder.write(NAME, content)
    assert not is_locked(folder)
    with RemoteLock(folder, "--save x") as lock:
        assert lock.is_held()


def test_storage_that_never_answers_does_not_keep_a_run_from_ending(folder, monkeypatch, capsys):
    monkeypatch.setattr(locks, "REMOTE_HEARTBEAT", 0.01)
    monkeypatch.setattr(locks, "END_SECONDS", 0.01)
    storage, beats, answers = register(folder._system[0].root), threading.Event(), threading.Event()

    def before(verb, path):
        beats.set()
        answers.wait()

    with RemoteLock(folder, "--save x") as lock:
        storage.before = staticmethod(before)
        beats.wait()
    answers.set()
    lock._heartbeat.join()
    assert "note: --save x: the lock stays, and the next run waits 60 s (the storage has not" in capsys.readouterr().out
