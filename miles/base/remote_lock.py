"""Lock a folder in remote storage, so that two launchers never write the same one.

The lock is the file ``.miles-lock`` in the folder, as in a local one (folder_lock.py). Its owner writes it again every
``HEARTBEAT_SECONDS`` with a higher number. A launcher that finds the lock of another host waits until that number
changes, and stops, or until it has not changed for ``STALE_SECONDS``, and takes the lock over. No clocks are compared.
On its own host it asks for the process instead, and need not wait.

Storage that can create a file only if it is missing (S3, Google Cloud Storage, local disks) lets one of two launchers
win that start together. On other storage both may begin, and the one that is overwritten stops before it publishes.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import psutil

from miles.base.folder_lock import NAME
from miles.base.remote_folder import RemoteError, RemoteFolder
from miles.config.checkpoint import CheckpointArguments

HEARTBEAT_SECONDS = 15.0
STALE_SECONDS = 60.0
POLL_SECONDS = 2.0
MOMENT_SECONDS = 0.2
END_SECONDS = 90.0  # for a heartbeat, whose two calls are each tried again for 31 s
_held: set[str] = set()  # the ids of the locks of this process


class RemoteLock:
    """The lock of a folder, for the length of a ``with`` block.

    Args:
        folder: The folder.
        flag: The flag that names it, for messages.
        stale_seconds: How long a lock of another host may stay the same before it is taken over.

    Raises:
        ValueError: Another launcher that is alive writes to the folder, or the folder cannot be written.
    """

    def __init__(self, folder: RemoteFolder, flag: str, stale_seconds: float = STALE_SECONDS) -> None:
        self.folder = folder
        self.flag = flag
        self._stale_seconds = stale_seconds
        self._record: dict[str, Any] = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": psutil.Process().create_time(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "id": uuid.uuid4().hex,
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
        _held.add(self._record["id"])
        self._heartbeat.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._heartbeat.join(END_SECONDS)
        _held.discard(self._record["id"])
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
        found = _read(self.folder)  # None: half-written by the heartbeat, on storage that does not write in one step
        return found is None or bool(found["id"] == self._record["id"])

    def _data(self) -> bytes:
        return json.dumps(self._record).encode()

    def _remove_if_dead(self) -> None:
        """Remove the lock of a launcher that has died, or wait until it shows that it is alive."""
        first = _read(self.folder)
        if first is None:  # perhaps it is just being written
            self._end.wait(MOMENT_SECONDS)
            first = _read(self.folder)
        until = time.monotonic() + self._stale_seconds
        if first is not None and first["host"] != self._record["host"]:
            print(
                f"note: {self.flag}: {_owner(first)} has a lock on this folder; waiting up to "
                f"{self._stale_seconds:g} s for a sign that it is alive"
            )
            while time.monotonic() < until:
                self._end.wait(min(POLL_SECONDS, self._stale_seconds))
                now = _read(self.folder)
                if now is None:  # released
                    return
                if now != first:
                    raise self._in_use(now)
        elif first is not None and _is_alive(first):
            raise self._in_use(first)
        self.folder.remove([NAME])

    def _in_use(self, owner: dict[str, Any]) -> ValueError:
        return ValueError(
            f"{self.flag}: another run is writing to this folder ({_owner(owner)}); wait for it to end, stop it, or "
            "give another folder"
        )

    def _beat(self) -> None:
        while not self._end.wait(HEARTBEAT_SECONDS):
            try:
                if not self.is_held():
                    return
                self._record = {**self._record, "beat": self._record["beat"] + 1, "time": time.time()}
                self.folder.write(NAME, self._data())
            except RemoteError:  # the storage does not answer: the next upload says so
                continue


@contextmanager
def locked_in_remote_storage(checkpoint: CheckpointArguments) -> Iterator[RemoteLock | None]:
    """Hold the lock of ``--save`` for the length of the block if it is in remote storage."""
    if "save" not in checkpoint.urls:
        yield None
        return
    url = checkpoint.urls["save"]
    with RemoteLock(RemoteFolder(url, checkpoint.file_system_options), f"--save {url}") as lock:
        yield lock


def is_locked(folder: RemoteFolder) -> bool:
    """Return whether a launcher has shown within ``STALE_SECONDS``, by this host's clock, that it writes there."""
    owner = _read(folder)
    return owner is not None and abs(time.time() - owner["time"]) < STALE_SECONDS


def _read(folder: RemoteFolder) -> dict[str, Any] | None:
    """Return the owner's record; None without one, or if it is no record."""
    try:
        found = json.loads(folder.read(NAME) or b"")
    except ValueError:
        return None
    kinds: dict[str, Any] = {"host": str, "pid": int, "id": str, "started": str, "beat": int, "time": (int, float)}
    is_record = isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())
    return found if is_record else None


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether a process of this host runs. This process itself may have been another launcher (restarts.py)."""
    if owner["pid"] == os.getpid():
        return owner["id"] in _held
    try:
        return bool(abs(psutil.Process(owner["pid"]).create_time() - float(owner.get("process_started", 0))) < 1)
    except psutil.NoSuchProcess:
        return False


def _owner(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['started']}"
