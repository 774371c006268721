"""Say in words why a folder cannot be written: its disk is full or read-only, or a quota is used up."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from pathlib import Path

import psutil

PROBE_BYTES = 1024**2
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


class SaveFailed(OSError):
    """A checkpoint could not be written because of the disk. The message is one sentence that names the disk."""


def disk_fault(folder: Path, error: BaseException) -> str | None:
    """Return what is wrong with the disk of ``folder`` as part of a sentence; None if ``error`` is about another thing.

    PyTorch does not always say why a write failed, so the folder is probed too.
    """
    number = _number(error) or _probe(folder)
    return None if number is None else f"{_disk(folder)} {_WORDS[number]}"


def _number(error: BaseException | None) -> int | None:
    """Return the first error number in the chain of ``error`` that concerns a disk."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in _WORDS:
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _probe(folder: Path) -> int | None:
    """Write a small file, as a checkpoint would; return the error number if that fails."""
    path = _existing(folder) / f".probe-{uuid.uuid4().hex}"
    try:
        with path.open("wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno if error.errno in _WORDS else None
    finally:
        path.unlink(missing_ok=True)
    return None


def _disk(folder: Path) -> str:
    """Return the disk of ``folder``: device, mount point and free space."""
    existing = _existing(folder)
    mounted = [part for part in psutil.disk_partitions(all=True) if existing.is_relative_to(part.mountpoint)]
    usage = shutil.disk_usage(existing)
    space = f"{usage.free / 1e9:.3g} of {usage.total / 1e9:.3g} GB free"
    if not mounted:
        return f"the disk of {existing} ({space})"
    disk = max(mounted, key=lambda part: len(part.mountpoint))
    return f"the disk {disk.device} at {disk.mountpoint} ({space})"


def _existing(folder: Path) -> Path:
    """Return ``folder``, or the nearest folder above it that exists."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())
