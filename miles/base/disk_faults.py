"""Say in words why a file or folder cannot be written, such as on a full disk, or cannot be read."""

import errno
import os
import re
import select
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import psutil

PROBE_BYTES = 1024**2
_RUST_NUMBER = re.compile(r"\(os error (\d+)\)")  # in the words of its std::io::Error
_WORDS = {
    errno.ENOSPC: "is full",
    errno.EDQUOT: "has no room left within your quota",
    errno.EROFS: "is read-only",
    errno.EACCES: "does not let this user write there",
    errno.EPERM: "does not let this user write there",
    errno.EFBIG: "allows no file of this size (ulimit -f, or the file system's limit)",
    errno.EIO: "reports an input/output error",
    errno.ESTALE: "is no longer mounted (stale file handle)",
    errno.ENOTCONN: "is no longer mounted",
}


class WriteFailed(OSError):
    """A file that a run needs could not be written because of the disk. The message is one sentence that names both."""


def disk_fault(path: Path, error: BaseException) -> str | None:
    """Return the fault of the disk of ``path`` as part of a sentence; None if ``error`` is about another thing.

    PyTorch does not always say why a write failed, so the folder is probed too.
    """
    number = _number(error) or _probe(path)
    return None if number is None else f"{_disk(path)} {_WORDS[number]}"


@contextmanager
def naming_disk(
    path: Path,
    partial: Path | None = None,
    what: str | None = None,
    then: str | None = None,
    failures: tuple[type[Exception], ...] = (OSError,),
) -> Iterator[None]:
    """Raise ``WriteFailed`` if the disk is why the block cannot write ``path``.

    Args:
        path: A file or folder.
        partial: The file or folder that replaces it once it is whole. It is removed after a failure, as it may be what
            fills the disk.
        what: Names ``path`` in the message.
        then: The end of the message, such as what to do.
        failures: The errors that a write may raise. Others pass.
    """
    try:
        yield
    except failures as error:
        fault = None if isinstance(error, WriteFailed) else disk_fault(path, error)
        if partial is not None:
            _remove(partial)
        if fault is None:
            raise
        words = f"{what or path} was not written, because {fault}"
        raise WriteFailed(words if then is None else f"{words}; {then}") from error


def _remove(partial: Path) -> None:
    with suppress(OSError):  # a file system that is no longer mounted does not even give its type
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink()


def _number(error: BaseException | None) -> int | None:
    """Return the first error number in the chain of ``error`` that concerns a disk.

    Libraries in Rust, as safetensors, have it in their words. Ray has the error of another process in ``cause``.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (in_words := _RUST_NUMBER.search(str(error))):
            number = int(in_words[1])
        if number in _WORDS:
            return number
        original = getattr(error, "cause", None)
        error = original if isinstance(original, BaseException) else error.__cause__ or error.__context__
    return None


def _probe(path: Path) -> int | None:
    """Write a small file, as a checkpoint would; return the error number if that fails."""
    try:
        probe = existing(path) / f".probe-{uuid.uuid4().hex}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        return error.errno if error.errno in _WORDS else None
    return None


def _disk(path: Path) -> str:
    """Return the disk of ``path``: device, mount point, and free space if it states."""
    resolved = path.resolve()
    mounted = [part for part in psutil.disk_partitions(all=True) if resolved.is_relative_to(part.mountpoint)]
    space = ""
    with suppress(OSError):
        usage = shutil.disk_usage(existing(path))
        space = f" ({usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free)"
    if not mounted:
        return f"the disk of {path}{space}"
    disk = max(mounted, key=lambda part: len(part.mountpoint))
    return f"the disk {disk.device} at {disk.mountpoint}{space}"


def existing(path: Path) -> Path:
    """Return ``path``, or the nearest folder above it that exists. Raises ``OSError`` if its disk does not answer."""
    resolved = path.resolve()
    return next(each for each in (resolved, *resolved.parents) if each.is_dir())


# Say in one sentence that a folder of checkpoints cannot be read: permissions, or a disk that does not answer.


@contextmanager
def reading(flag: str) -> Iterator[None]:
    """Raise ``ValueError`` that names ``flag``, the path and the reason if the block cannot read a file or folder.

    Whether there are checkpoints is not known then, so the run must not continue as if there were none.
    """
    try:
        yield
    except OSError as error:
        where = "it" if error.filename is None else str(error.filename)
        raise ValueError(
            f"{flag}: {where} cannot be read ({error.strerror or error}), so it is not known whether checkpoints are "
            "there; correct its permissions or its disk, or give another folder"
        ) from error


# Recognize an error of standard output: nobody reads it, as after `| head`, or it is a file on a full disk.


_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def fault_of_output(error: Exception) -> str | None:
    """Return the fault of standard output if that is why ``error`` was raised; else None.

    All later output is lost: Python would complain again when it closes the stream.
    """
    if isinstance(error, BrokenPipeError) and not (_is_closed(sys.stdout) or _is_closed(sys.stderr)):
        return None  # of another pipe or connection, or of another process
    if not isinstance(error, BrokenPipeError) and getattr(error, "errno", None) not in _CANNOT_WRITE:
        return None
    fault = "standard output was closed"
    if not isinstance(error, BrokenPipeError):
        try:
            os.write(sys.stdout.fileno(), b"\n")  # what could not be written is no longer in the stream
            return None
        except OSError as again:
            fault = f"standard output cannot be written ({again.strerror})"
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return fault


def _is_closed(stream: TextIO) -> bool:
    """Return whether the other end of a pipe or terminal is closed."""
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # no file, as in a notebook
        return False
    look = select.poll()
    look.register(number, 0)  # errors are reported in any case
    return bool(look.poll(0))
