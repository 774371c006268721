"""A folder in remote storage, reached through fsspec: ``s3://``, ``gs://``, ``abfs://``, ``sftp://``.

Credentials come from the environment, as the package of each protocol reads them, or from ``--storage-options``. A call
that fails is tried again, with growing pauses. Names of files are relative to the folder, with slashes.

Source: fsspec's ``AbstractFileSystem`` (https://filesystem-spec.readthedocs.io). Its listings are cached, so each
listing here drops that cache first.
"""

from __future__ import annotations

import importlib.util
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from miles.base.secrets import public
from miles.base.text import one_line

RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # the pauses between the tries of a call
READ_ONLY = ("http", "https", "github", "data", "git", "zip", "tar")
_PARALLEL_FILES = 8  # of protocols that work asynchronously; the others are not safe in threads
_HAS_FOLDERS = ("file", "local", "sftp", "ssh", "smb", "hdfs", "webhdfs", "ftp")  # that must exist before their files
PLACEHOLDER = re.compile(r"\{(?:iteration|rollout_id)\}")  # of the number of an iteration, in a path
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)")

T = TypeVar("T")


class RemoteError(OSError):
    """Remote storage cannot be read or written. The message names the address, the reason and the number of tries."""


def is_url(text: str) -> bool:
    """Return whether ``text`` names a folder in remote storage, not a path of this machine.

    >>> is_url("s3://bucket/run"), is_url("runs/a")
    (True, False)
    """
    return "://" in text


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, in lower case; empty if it has none that can be read."""
    match = _URL.fullmatch(url)
    return "" if match is None else match[1].lower()


def fault_of_url(url: str, written: bool) -> tuple[str, str] | None:
    """Return the rule that a URL breaks and what to do, or None. Imports no package of a protocol.

    Args:
        url: The value of the flag.
        written: Whether the folder is to be written.
    """
    from fsspec.registry import known_implementations, registry

    match, protocol = _URL.fullmatch(url), protocol_of(url)
    if match is None:
        return "is not a URL that fsspec reads", "give one such as s3://BUCKET/FOLDER, or a path of this machine"
    if not match[2].strip("/"):
        return "names no folder", f"give one such as {protocol}://BUCKET/FOLDER"
    if written and protocol in READ_ONLY:
        return f"cannot be written: {protocol} is read-only", "give a folder of a storage such as s3:// or gs://"
    if protocol in registry:
        return None
    if protocol not in known_implementations:
        return "has a protocol that fsspec does not know", "give one such as s3://, gs://, abfs:// or hf://buckets/"
    package = known_implementations[protocol]["class"].split(".")[0]
    if importlib.util.find_spec(package) is None:
        return f"needs the package {package}, which is not installed", f"run pip install {package}"
    return None


class RemoteFolder:
    """A folder in remote storage.

    Args:
        url: Its address.
        options: The arguments of the protocol's file system (``--storage-options``).
        pauses: Seconds between the tries of a call.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, pauses: Iterable[float] = RETRY_SECONDS
    ) -> None:
        self.url = url.rstrip("/")
        self.options = dict(options or {})
        self.pauses = tuple(pauses)
        self.giving_up = threading.Event()  # set: a call that fails is not tried again

    def __str__(self) -> str:
        return str(public("", self.url))

    def child(self, name: str) -> RemoteFolder:
        """Return a folder inside this one. Giving up here ends its retries too."""
        child = RemoteFolder(f"{self.url}/{name}", self.options, self.pauses)
        child.giving_up = self.giving_up
        return child

    @cached_property
    def _system(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        try:
            system, path = url_to_fs(self.url, **self.options)
        except Exception as error:  # some protocols connect here, and each has its own errors
            reason = one_line(str(error), 200) or "no message"
            raise RemoteError(f"{self} cannot be reached ({type(error).__name__}: {reason})") from error
        return system, path.rstrip("/")

    def files(self, within: str = "") -> dict[str, int]:
        """Return the bytes of every file in the folder and below it, by name; only the files of a folder ``within``.

        Raises:
            RemoteError: The storage does not answer.
        """
        system, root = self._system
        start = f"{root}/{within}" if within else root

        def listed() -> dict[str, int]:
            system.invalidate_cache()
            try:
                entries = system.find(start, detail=True)
            except FileNotFoundError:
                return {}
            return {
                path[len(root) :].lstrip("/"): int(entry.get("size") or 0)
                for path, entry in entries.items()
                if path.startswith(f"{root}/") and is_inside(path[len(root) :].lstrip("/"))
            }

        return self._tried("cannot be listed", listed)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None without it. Raises ``RemoteError``."""
        system, root = self._system

        def content() -> bytes | None:
            try:
                return bytes(system.cat_file(f"{root}/{name}"))
            except FileNotFoundError:
                return None

        return self._tried(f"{name} cannot be read", content)

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the contents of small files by name, without those that are missing. Raises ``RemoteError``."""
        contents = self._on_each(names, lambda name: (name, self.read(name)))
        return {name: data for name, data in contents if data is not None}

    def write(self, name: str, data: bytes) -> None:
        """Write a small file. Raises ``RemoteError``."""
        system, root = self._system

        def write() -> None:
            self._make_parents(name)
            system.pipe_file(f"{root}/{name}", data)

        self._tried(f"{name} cannot be written", write)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file unless it is there, in one step if the storage can; return whether it was written."""
        system, root = self._system

        def create() -> bool:
            self._make_parents(name)
            try:
                system.pipe_file(f"{root}/{name}", data, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):  # of a protocol that cannot
                if system.exists(f"{root}/{name}"):
                    return False
                system.pipe_file(f"{root}/{name}", data)
            return True

        return self._tried(f"{name} cannot be written", create)

    def upload(self, folder: Path, names: Iterable[str]) -> None:
        """Copy files of the local ``folder`` here, under the same names. Raises ``RemoteError``."""
        system, root = self._system

        def put(name: str) -> None:
            self._make_parents(name)
            system.put_file(str(folder / name), f"{root}/{name}")

        self._on_each(names, lambda name: self._tried(f"{name} cannot be written", partial(put, name)))

    def download(self, names: Iterable[str], folder: Path) -> None:
        """Copy files into the local ``folder``, under the same names.

        Raises:
            RemoteError: A file cannot be read.
            FileNotFoundError: A file is not there any more.
        """
        system, root = self._system

        def download(name: str) -> None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            is_copied = self._tried(f"{name} cannot be read", lambda: get(name))
            if not is_copied:
                raise FileNotFoundError(name)

        def get(name: str) -> bool:
            try:
                system.get_file(f"{root}/{name}", str(folder / name))
            except FileNotFoundError:
                return False
            return True

        self._on_each(names, download)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error. Raises ``RemoteError``."""
        system, root = self._system

        def remove(name: str) -> None:
            with suppress(FileNotFoundError):
                system.rm_file(f"{root}/{name}")

        self._on_each(names, lambda name: self._tried(f"{name} cannot be removed", partial(remove, name)))

    def remove_empty_folder(self, name: str) -> None:
        """Remove the remains of a folder whose files are removed, on storage that has folders."""
        system, root = self._system
        if protocol_of(self.url) in _HAS_FOLDERS and system.exists(f"{root}/{name}"):
            self._tried(f"{name} cannot be removed", lambda: system.rm(f"{root}/{name}", recursive=True))

    def _make_parents(self, name: str) -> None:
        """Make the folders of a file on storage that has folders. On others that might make a bucket."""
        if protocol_of(self.url) in _HAS_FOLDERS:
            system, root = self._system
            system.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)

    def _on_each(self, names: Iterable[str], call: Callable[[str], T]) -> list[T]:
        chosen = list(names)
        system, _ = self._system
        if not getattr(system, "async_impl", False) or len(chosen) < 2:
            return [call(name) for name in chosen]
        return _in_threads(chosen, call)

    def _tried(self, what: str, call: Callable[[], T]) -> T:
        """Call, and again after each pause if that fails for a reason that may pass."""
        for tries, pause in enumerate((*self.pauses, None), start=1):
            try:
                return call()
            except Exception as error:  # each protocol has its own errors
                if pause is None or _stays(error) or self.giving_up.wait(pause):
                    count = "1 try" if tries == 1 else f"{tries} tries"
                    reason = one_line(str(error), 200) or "no message"
                    raise RemoteError(f"{self}: {what} after {count} ({type(error).__name__}: {reason})") from error
        raise AssertionError("the last try returns or raises")


def _in_threads(names: Sequence[str], call: Callable[[str], T]) -> list[T]:
    """Return what ``call`` returns for each name. The first failure is raised when all calls that run have ended.

    The threads are daemons, unlike an executor's threads: a process that ends, as after Ctrl-C, leaves files that are
    being copied alone, however long they would take.
    """
    left, results, failures = deque(enumerate(names)), dict[int, T](), list[Exception]()

    def work() -> None:
        while left:
            try:
                place, name = left.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                results[place] = call(name)
            except Exception as error:
                failures.append(error)
                left.clear()

    threads = [
        threading.Thread(target=work, name="remote-files", daemon=True) for _ in range(min(_PARALLEL_FILES, len(names)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        left.clear()
    if failures:
        raise failures[0]
    return [results[place] for place in range(len(names))]


def is_inside(name: str) -> bool:
    """Return whether the name of a file, which others may have chosen, stays within its folder."""
    parts = PurePosixPath(name).parts
    return bool(parts) and ".." not in parts and not name.startswith("/") and "\0" not in name


def _stays(error: Exception) -> bool:
    """Return whether an error would be the same at the next try."""
    final = (FileNotFoundError, PermissionError, NotImplementedError)  # the first is a missing bucket
    return isinstance(error, final) or "Credentials" in type(error).__name__
