"""A folder in remote storage: files are read back as written, failures are tried again, and faults are one sentence."""

import json
import subprocess
import sys

import pytest

from miles.base.storage import RemoteError, RemoteFolder, fault_of_url, is_inside
from tests.fast.support.failing_storage import register


@pytest.fixture
def storage(tmp_path):
    return register(tmp_path / "storage")


@pytest.fixture(params=["memory", "file", "failing"])
def folder(request, tmp_path, storage):
    urls = {
        "memory": f"memory://{tmp_path.name}/run",
        "file": f"file://{tmp_path}/remote/run",
        "failing": "failing://run",
    }
    return RemoteFolder(urls[request.param], pauses=[])


def test_files_are_listed_read_copied_and_removed(folder, tmp_path):
    (tmp_path / "here/deep").mkdir(parents=True)
    (tmp_path / "here/a").write_bytes(b"abc")
    (tmp_path / "here/deep/b [1]").write_bytes(b"")
    assert folder.files() == {}
    folder.upload(tmp_path / "here", ["a", "deep/b [1]"])
    folder.write("c", b"12")
    assert folder.files() == {"a": 3, "deep/b [1]": 0, "c": 2}
    assert folder.files("deep") == {"deep/b [1]": 0}
    assert folder.child("deep").files() == {"b [1]": 0}
    assert folder.read("c") == b"12" and folder.read("missing") is None
    assert folder.read_all(["a", "missing", "c"]) == {"a": b"abc", "c": b"12"}
    folder.download(["a", "deep/b [1]"], tmp_path / "back")
    assert (tmp_path / "back/a").read_bytes() == b"abc" and (tmp_path / "back/deep/b [1]").read_bytes() == b""
    with pytest.raises(FileNotFoundError, match="missing"):
        folder.download(["missing"], tmp_path / "back")
    folder.remove(["a", "missing", "deep/b [1]"])
    folder.remove_empty_folder("deep")
    assert folder.files() == {"c": 2}


def test_only_the_first_creates_a_file(folder):
    assert folder.create("lock", b"first")
    assert not folder.create("lock", b"second")
    assert folder.read("lock") == b"first"


def test_a_call_that_fails_is_tried_again(storage, tmp_path):
    folder = RemoteFolder("failing://run", pauses=[0, 0])
    failures = [ConnectionError("reset"), TimeoutError()]

    def before(verb, path):
        if failures:
            raise failures.pop()

    storage.before = staticmethod(before)
    folder.write("a", b"1")
    assert folder.read("a") == b"1"
    assert [verb for verb, _ in storage.calls] == ["pipe"] * 3 + ["cat"]


def test_after_the_last_try_the_error_names_the_place_and_the_reason(storage):
    def before(verb, path):
        raise ConnectionError("reset\nby peer")

    storage.before = staticmethod(before)
    folder = RemoteFolder("failing://user:pass@host/run/", pauses=[0, 0])
    with pytest.raises(RemoteError) as caught:
        folder.write("a", b"1")
    assert str(caught.value) == (
        "failing://(hidden)@host/run: a cannot be written after 3 tries (ConnectionError: reset by peer)"
    )


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("no bucket")])
def test_an_error_that_stays_is_not_tried_again(storage, error):
    def before(verb, path):
        raise error

    storage.before = staticmethod(before)
    with pytest.raises(RemoteError, match="after 1 try"):
        RemoteFolder("failing://run", pauses=[60]).write("a", b"1")


def test_giving_up_ends_the_pauses(storage):
    def before(verb, path):
        raise ConnectionError

    storage.before = staticmethod(before)
    folder = RemoteFolder("failing://run", pauses=[600])
    folder.giving_up.set()
    with pytest.raises(RemoteError, match="no message"):
        folder.child("a").read("b")


@pytest.mark.parametrize(
    "url, rule",
    [
        ("s3://", "names no folder"),
        ("https://host/run", "is read-only"),
        ("nothing://host/run", "does not know"),
        ("simplecache::s3://b/run", "is not a URL"),
        ("oss://bucket/run", "needs the package ossfs, which is not installed"),
    ],
)
def test_a_url_that_cannot_be_written_is_refused(url, rule):
    fault = fault_of_url(url, written=True)
    assert fault is not None and rule in fault[0] and fault[1]


@pytest.mark.parametrize("url", ["memory://run", "file:///tmp/run", "hf://buckets/me/run"])
def test_a_url_of_an_installed_protocol_is_fine(url):
    assert fault_of_url(url, written=True) is None


def test_names_that_leave_the_folder_are_known():
    assert is_inside("a/b.c") and is_inside("..a")
    assert not any(map(is_inside, ["", "/a", "../a", "a/../../b", "a\0"]))


def test_listed_names_that_leave_the_folder_are_left_out(tmp_path, monkeypatch):
    folder = RemoteFolder(f"memory://{tmp_path.name}/x", pauses=[])
    folder.write("good", b"1")
    system, root = folder._system
    monkeypatch.setattr(
        system, "find", lambda *_, **__: {f"{root}/good": {"size": 1}, f"{root}/../up": {"size": 1}, "/": {"size": 0}}
    )
    assert json.dumps(folder.files()) == '{"good": 1}'


NEVER_ENDS = """
import asyncio, sys, threading
from pathlib import Path
import fsspec
from fsspec.asyn import AsyncFileSystem
from miles.base.storage import RemoteFolder

started = threading.Barrier(3)

class Hangs(AsyncFileSystem):
    protocol = "hangs"

    async def _put_file(self, here, there, **named):
        await asyncio.to_thread(started.wait)
        await asyncio.Event().wait()

fsspec.register_implementation("hangs", Hangs)
folder = RemoteFolder("hangs://bucket/run")
copy = lambda: folder.upload(Path(sys.argv[1]), ["a", "b"])
"""


@pytest.mark.parametrize(
    "ends",
    [
        "threading.Thread(target=copy, daemon=True).start()\nstarted.wait()",
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # nohup may have had it ignored
        "main = threading.main_thread().ident\n"
        "threading.Thread(target=lambda: (started.wait(), signal.pthread_kill(main, signal.SIGINT))).start()\n"
        "try:\n    copy()\nexcept KeyboardInterrupt:\n    pass",
    ],
    ids=["with the uploads of a run", "by Ctrl-C"],
)
def test_a_process_ends_while_files_are_copied(tmp_path, ends):
    for name in ("a", "b"):
        (tmp_path / name).touch()
    subprocess.run([sys.executable, "-c", NEVER_ENDS + ends, str(tmp_path)], check=True, timeout=60)


def test_the_first_failure_of_several_files_ends_the_others(storage, tmp_path):
    calls = []

    def before(verb, path):
        calls.append(path)
        raise PermissionError("denied")

    storage.before = staticmethod(before)
    for number in range(40):
        (tmp_path / str(number)).touch()
    with pytest.raises(RemoteError, match=r"cannot be written after 1 try \(PermissionError: denied\)"):
        RemoteFolder("failing://run", pauses=[]).upload(tmp_path, map(str, range(40)))
    assert len(calls) < 40
