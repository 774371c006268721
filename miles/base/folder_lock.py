"""Lock the folders that a run writes, so that two launchers never write the same one.

The lock is the file ``.miles-lock`` in the folder. That of an export, whose folder is replaced as a whole, is beside
the folder, and has its name. A lock holds host, process id and start time of its owner, and the owner updates it every
``HEARTBEAT_SECONDS``. On one host ``flock`` decides: the kernel releases it when the owner dies, in whatever way.
Another host may share the folder without sharing ``flock``; there the heartbeat decides, and a lock without one for
``STALE_SECONDS`` is taken over. Ages are differences of the folder's own file times, because the clocks of two hosts
may differ. A launcher that was stopped for so long, and continues, sees that before it writes again
(``FolderLocks.check``).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from miles.base.host.disk_faults import disk_fault
from miles.config.rollout import PLACEHOLDER

NAME = ".miles-lock"
HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
RELEASE_SECONDS = 5.0  # for all locks at an end at once
_LONGEST_OF_EXPORT = 180  # bytes of a name in that of a lock, which gets an id once more (``_age``)
_held: dict[Path, dict[str, Any]] = {}  # the locks of this process, and what is written in them


@dataclass(frozen=True)
class FolderLocks:
    """The locks that this launcher holds: flag and folder, lock file, and what this launcher has written there."""

    held: tuple[tuple[str, Path, dict[str, Any]], ...]

    def check(self) -> None:
        """Raise ``ValueError`` if another launcher has taken a folder over, or the lock file was removed.

        Called before a run writes: a launcher that was stopped for long must not write beside the one that followed it.
        """
        for shown, path, record in self.held:
            owner = _read(path)
            if owner == record:
                continue
            if owner is not None:
                raise ValueError(
                    f"{shown}: {_named(owner)} has taken this folder over, as this run gave no sign of "
                    f"life for {STALE_SECONDS:g} s; this run ends and leaves the folder to that one"
                )
            if not path.exists():
                raise ValueError(
                    f"{shown}: the lock {path.name} of this run was removed, so another run may write to this "
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
    locks = [*by_path.values(), *([] if export is None else [(f"--save-hf {export}", _lock_of_export(export))])]
    with ExitStack() as held:
        records = [(shown, path, held.enter_context(_locked(shown, path))) for shown, path in locks]
        yield FolderLocks(tuple(records))


def _lock_of_export(template: str) -> Path:
    """Return the lock of all exports of a name, in which ``{iteration}`` is any number: beside the first of them."""
    parts = Path(os.path.realpath(template)).parts
    first = next((n for n, part in enumerate(parts) if PLACEHOLDER.search(part)), len(parts) - 1)
    name = PLACEHOLDER.sub("{iteration}", "-".join(parts[first:]))
    if len(name.encode()) > _LONGEST_OF_EXPORT:
        name = hashlib.sha256(name.encode()).hexdigest()
    return Path(*parts[:first], f"{NAME}-{name}")


@contextmanager
def _locked(shown: str, path: Path) -> Iterator[dict[str, Any]]:
    """Hold the lock ``path`` of a folder, ``shown`` with its flag, and yield what is written in it."""
    with _flocked(shown, path):
        try:
            owner = _record_in(path)
        except OSError as error:  # on a file system of two hosts, a launcher on the other one may hold it
            raise _not_readable(shown, path, error) from None
        if owner is not None and owner["host"] != _host() and _age(path) < STALE_SECONDS:
            raise _in_use(shown, owner)
        record = {"host": _host(), "pid": os.getpid(), "started": time.strftime("%Y-%m-%d %H:%M:%S"), "id": _new_id()}
        try:
            _write(path, record)
        except OSError as error:
            with suppress(OSError):
                path.unlink()  # half a lock, which would look like one that is being written
            raise _not_writable(shown, path, error) from None
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


def _flocked(shown: str, path: Path) -> TextIO:
    """Open the lock file and take its ``flock``; closing the file releases it."""
    while True:
        file = _open(shown, path)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_ino == path.stat().st_ino:
                return file
        except BlockingIOError:
            file.close()
            raise _in_use(shown, _read(path)) from None
        except FileNotFoundError:
            pass
        file.close()  # its last owner removed it between our two calls: it locks nothing any more


def _open(shown: str, path: Path) -> TextIO:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+")
    except OSError as error:
        raise _not_writable(shown, path, error) from None


def _not_writable(shown: str, path: Path, error: OSError) -> ValueError:
    fault = disk_fault(path.parent, error) or error.strerror
    return ValueError(f"{shown}: cannot be written, because {fault}; make room, or give another folder")


def _not_readable(shown: str, path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{shown}: the lock {path.name} cannot be read ({error.strerror}), so another run may be writing to "
        "this folder; try again, or give another folder"
    )


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
    probe = path.with_name(f"{path.name}.{_new_id()}")
    probe.touch()
    now = probe.stat().st_mtime
    probe.unlink()
    return now - path.stat().st_mtime


def _host() -> str:
    return socket.gethostname()


def _new_id() -> str:
    return uuid.uuid4().hex


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"


def _in_use(shown: str, owner: dict[str, Any] | None) -> ValueError:
    who = "another launcher" if owner is None else _named(owner)
    return ValueError(
        f"{shown}: another run is writing to this folder ({who}); wait for it to end, stop it, or give another folder"
    )
