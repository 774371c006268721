"""Lock the folders that a run writes, so that two launchers never write the same one.

The lock is the file ``.miles-lock`` in the folder. An export's folder is replaced as a whole, so its lock is alongside
the folder, and has its name. A lock holds host, process id and start time of its owner, and the owner updates it every
``HEARTBEAT_SECONDS``. On one host ``flock`` decides: the kernel releases it when the owner dies, in whatever way.
Another host may share the folder without sharing ``flock``; there the heartbeat decides, and a lock without one for
``STALE_SECONDS`` is taken over. Ages are differences of the folder's own file times, because the clocks of two hosts
may differ. A launcher that was stopped for so long, and continues, sees that before it writes again
(``FolderLocks.check``).

filelock 4.3's lease does not carry this: it watches the lock of another host for its whole term, also one without a
heartbeat for long, takes a half-written lock for a live one, and knows no remote storage.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import psutil

from miles.base.disk_faults import disk_fault
from miles.base.storage import PLACEHOLDER, RemoteError, RemoteFolder

NAME = ".miles-lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
RELEASE_SECONDS = 5.0  # for all locks at an end at once
_LONGEST_OF_EXPORT = 180  # bytes of a name within a lock's name, which gets an id once more (``_age``)
_held: dict[Path, dict[str, Any]] = {}  # the locks of this process, and their contents


@dataclass(frozen=True)
class FolderLocks:
    """The locks that this launcher holds: flag and folder, lock file, and what this launcher has written there."""

    held: tuple[tuple[str, Path, dict[str, Any]], ...]

    def check(self) -> None:
        """Raise ``ValueError`` if another launcher has taken a folder over, or the lock file was removed.

        Called before a run writes: a launcher that was stopped for long must not write alongside the one that followed
        it.
        """
        for label, path, record in self.held:
            owner = _read(path)
            if owner == record:
                continue
            if owner is not None:
                raise ValueError(
                    f"{label}: {_named(owner)} has taken this folder over, as this run gave no sign of "
                    f"life for {STALE_SECONDS:g} s; this run ends and leaves the folder to that one"
                )
            if not path.exists():
                raise ValueError(
                    f"{label}: the lock {path.name} of this run was removed, so another run may write to this "
                    "folder; start again, and do not remove the lock"
                )


@contextmanager
def locked_folders(folders: Iterable[tuple[str, Path]], export: str | None = None) -> Iterator[FolderLocks]:
    """Hold the locks of ``folders`` for the length of the block; folders are created if missing.

    Args:
        folders: Pairs of the flag that names a folder, for messages, and the folder. One folder may be named twice.
        export: The local folder of ``--save-hf``, if there is one.

    Raises:
        ValueError: If another launcher that is alive writes to one of them.
    """
    by_path = {path.resolve(): (f"{flag} {path}", path / NAME) for flag, path in folders}
    locks = list(by_path.values())
    if export is not None:
        locks.append((f"--save-hf {export}", _lock_of_export(export)))
    with ExitStack() as held:
        records = [(label, path, held.enter_context(_locked(label, path))) for label, path in locks]
        yield FolderLocks(tuple(records))


def _lock_of_export(template: str) -> Path:
    """Return the lock of all exports of a name, where ``{iteration}`` is any number: alongside the first of them."""
    parts = Path(os.path.realpath(template)).parts
    first = next((n for n, part in enumerate(parts) if PLACEHOLDER.search(part)), len(parts) - 1)
    name = PLACEHOLDER.sub("{iteration}", "-".join(parts[first:]))
    if len(name.encode()) > _LONGEST_OF_EXPORT:
        name = hashlib.sha256(name.encode()).hexdigest()
    return Path(*parts[:first], f"{NAME}-{name}")


@contextmanager
def _locked(label: str, path: Path) -> Iterator[dict[str, Any]]:
    """Hold the lock ``path`` of a folder, ``label`` with its flag, and yield its contents."""
    with _flocked(label, path):
        try:
            owner = _record_in(path)
        except OSError as error:  # on a file system of two hosts, a launcher on the other one may hold it
            raise ValueError(
                f"{label}: the lock {path.name} cannot be read ({error.strerror}), so another run may be writing to "
                "this folder; try again, or give another folder"
            ) from None
        if owner is not None and owner["host"] != _host() and _age(path) < STALE_SECONDS:
            raise _in_use(label, owner)
        record = _new_record()
        try:
            _write(path, record)
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # half a lock, which would look like one that is being written
            raise _not_writable(label, path, error) from None
        stop = threading.Event()
        heartbeat = threading.Thread(target=_beat, args=(path, record, stop), name="folder-lock", daemon=True)
        heartbeat.start()
        _held[path] = record
        try:
            yield record
        finally:
            stop.set()
            heartbeat.join()
            _held.pop(path, None)
            _remove(path, record)


def release_at_end() -> None:
    """Remove the locks of this process, which ends next without leaving its blocks.

    Without that, a launcher on another host would wait for ``STALE_SECONDS``. A file system that does not answer is not
    waited for.
    """

    def release() -> None:
        for path, record in list(_held.items()):
            with suppress(OSError):
                _remove(path, record)

    thread = threading.Thread(target=release, name="release-locks", daemon=True)
    thread.start()
    thread.join(RELEASE_SECONDS)


def _remove(path: Path, record: dict[str, Any]) -> None:
    if _read(path) == record:
        path.unlink()


def is_held(folder: Path) -> bool:
    """Return whether a launcher that is alive writes to ``folder``. The lock is not touched.

    The age of its heartbeat is measured with this host's clock. With a heartbeat, a lock without a readable record is
    held: its owner is writing it, or the file system has failed for a moment. A lock that cannot be examined is too.
    """
    path = folder / NAME
    try:
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            return False
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    owner = _read(path)
    return owner is None or bool(owner["host"] != _host() or psutil.pid_exists(owner["pid"]))


def _flocked(label: str, path: Path) -> TextIO:
    """Open the lock file and take its ``flock``; closing the file releases it."""
    while True:
        file = _open(label, path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            file.close()
            raise _in_use(label, _read(path)) from None
        except FileNotFoundError:
            pass
        file.close()  # its last owner removed it between our two calls: it locks nothing any more


def _open(label: str, path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        raise _not_writable(label, path, error) from None


def _not_writable(label: str, path: Path, error: OSError) -> ValueError:
    fault = disk_fault(path.parent, error) or error.strerror
    remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "correct that"
    return ValueError(f"{label}: cannot be written, because {fault}; {remedy}, or give another folder")


def _beat(path: Path, record: dict[str, Any], stop: threading.Event) -> None:
    while not stop.wait(HEARTBEAT_SECONDS):
        # Another record means that a launcher took the folder over while this process was stopped. A lock that cannot
        # be read for a moment, as on a network file system, is kept.
        if _read(path) not in (record, None):
            return
        with suppress(OSError):
            os.utime(path)


def _write(path: Path, record: dict[str, Any]) -> None:
    """Write in place: a renamed file would be another inode, which is not the one that is locked."""
    with path.open("r+") as file:
        file.truncate()
        file.write(json.dumps(record))
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any] | None:
    """Return the owner's record, or None if there is none, or if the file cannot be read."""
    try:
        return _record_in(path)
    except OSError:
        return None


def _record_in(path: Path) -> dict[str, Any] | None:
    """Return the owner's record, or None if there is none (a new or half-written lock). Raises ``OSError``."""
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        return record if {"host", "pid", "started"} <= record.keys() else None
    except (ValueError, AttributeError):
        return None


def _age(path: Path) -> float:
    """Return the seconds since the last heartbeat, by the clock of the file system."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime


def _host() -> str:
    return socket.gethostname()


def _new_record() -> dict[str, Any]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": _host(), "pid": os.getpid(), "started": started, "id": uuid.uuid4().hex}


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"


def _in_use(label: str, owner: dict[str, Any] | None) -> ValueError:
    who = "another launcher" if owner is None else _named(owner)
    return ValueError(
        f"{label}: another run is writing to this folder ({who}); wait for it to end, stop it, or give another folder"
    )


# Lock a folder in remote storage, so that two launchers never write the same one.
#
# The lock is the file ``.miles-lock`` in the folder, as in a local one. Its owner writes it again every
# ``REMOTE_HEARTBEAT`` with a higher number. A launcher that finds the lock of another host waits until that number
# changes, and stops, or until it has not changed for ``REMOTE_STALE``, and takes the lock over. No clocks are compared.
# On its own host it asks for the process instead, and need not wait.
#
# Storage that can create a file only if it is missing (S3, Google Cloud Storage, local disks) lets one of two launchers
# win that start together. On other storage both may begin, and the one that is overwritten stops before it publishes.


REMOTE_HEARTBEAT = 15.0
REMOTE_STALE = 60.0
POLL_SECONDS = 2.0
MOMENT_SECONDS = 0.2
END_SECONDS = 90.0  # for a heartbeat, whose two calls are each tried again for 31 s
_held_remote: set[str] = set()  # the ids of the locks of this process


class RemoteLock:
    """The lock of a folder, for the length of a ``with`` block.

    Args:
        folder: The folder.
        flag: The flag that names it, for messages.
        stale_seconds: How long a lock of another host may stay the same before it is taken over.

    Raises:
        ValueError: Another launcher that is alive writes to the folder, or the folder cannot be written.
    """

    def __init__(self, folder: RemoteFolder, flag: str, stale_seconds: float = REMOTE_STALE) -> None:
        self.folder = folder
        self.flag = flag
        self._stale_seconds = stale_seconds
        self._record: dict[str, Any] = {
            **_new_record(),
            "process_started": psutil.Process().create_time(),
            "beat": 0,
            "time": time.time(),
        }
        self._end = threading.Event()
        self._heartbeat = threading.Thread(target=self._beat, name="remote-lock", daemon=True)

    def __enter__(self) -> RemoteLock:
        try:
            while not self.folder.create(NAME, self._data()):
                self._remove_if_dead()
        except RemoteError as error:
            raise ValueError(
                f"{self.flag}: {error}; check the address and the credentials, or give another folder"
            ) from error
        _held_remote.add(self._record["id"])
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._heartbeat.join(END_SECONDS)
        _held_remote.discard(self._record["id"])
        stays = f"note: {self.flag}: the lock stays, and the next run waits {self._stale_seconds:g} s"
        if self._heartbeat.is_alive():  # a call that never returns, which would not here either
            print(f"{stays} (the storage has not answered for {END_SECONDS:g} s)")
            return
        try:
            if self.is_held():
                self.folder.remove([NAME])
        except RemoteError as failure:
            print(f"{stays} ({failure})")

    def is_held(self) -> bool:
        """Return whether no other launcher has taken the lock over. Raises ``RemoteError``."""
        record = _read_remote(self.folder)  # None: half-written by the heartbeat, on storage that writes in steps
        return record is None or bool(record["id"] == self._record["id"])

    def _data(self) -> bytes:
        return json.dumps(self._record).encode()

    def _remove_if_dead(self) -> None:
        """Remove the lock of a launcher that has died, or wait until it shows that it is alive."""
        first = _read_remote(self.folder)
        if first is None:  # perhaps it is just being written
            self._end.wait(MOMENT_SECONDS)
            first = _read_remote(self.folder)
        until = time.monotonic() + self._stale_seconds
        if first is not None and first["host"] != self._record["host"]:
            print(
                f"note: {self.flag}: {_named(first)} has a lock on this folder; waiting up to "
                f"{self._stale_seconds:g} s for a sign that it is alive"
            )
            while time.monotonic() < until:
                self._end.wait(min(POLL_SECONDS, self._stale_seconds))
                now = _read_remote(self.folder)
                if now is None:  # released
                    return
                if now != first:
                    raise _in_use(self.flag, now)
        elif first is not None and _is_alive(first):
            raise _in_use(self.flag, first)
        self.folder.remove([NAME])

    def _beat(self) -> None:
        while not self._end.wait(REMOTE_HEARTBEAT):
            try:
                if not self.is_held():
                    return
                self._record = {**self._record, "beat": self._record["beat"] + 1, "time": time.time()}
                self.folder.write(NAME, self._data())
            except RemoteError:  # the storage does not answer: the next upload reports it
                continue


@contextmanager
def locked_in_remote_storage(url: str | None, options: Mapping[str, Any]) -> Iterator[RemoteLock | None]:
    """Hold the lock of ``--save`` for the length of the block if it is in remote storage.

    Args:
        url: Its URL; None for a local folder.
        options: The options of the storage's file system.
    """
    if url is None:
        yield None
        return
    with RemoteLock(RemoteFolder(url, options), f"--save {url}") as lock:
        yield lock


def is_locked(folder: RemoteFolder) -> bool:
    """Return whether a launcher has shown within ``REMOTE_STALE``, by this host's clock, that it writes there."""
    owner = _read_remote(folder)
    return owner is not None and abs(time.time() - owner["time"]) < REMOTE_STALE


def _read_remote(folder: RemoteFolder) -> dict[str, Any] | None:
    """Return the owner's record; None without one, or if it is no record."""
    try:
        record = json.loads(folder.read(NAME) or b"")
    except ValueError:
        return None
    kinds: dict[str, Any] = {"host": str, "pid": int, "id": str, "started": str, "beat": int, "time": (int, float)}
    is_record = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    return record if is_record else None


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether a process of this host runs. This process itself may have been another launcher (restarts.py)."""
    if owner["pid"] == os.getpid():
        return owner["id"] in _held_remote
    try:
        return bool(abs(psutil.Process(owner["pid"]).create_time() - float(owner.get("process_started", 0))) < 1)
    except psutil.NoSuchProcess:
        return False
