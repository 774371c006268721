"""Keep results for later processes in ``miles/`` of the cache folder. A result that is lost is computed again."""

import os
from contextlib import suppress
from pathlib import Path


def stored(name: str) -> bytes | None:
    """Return what ``store`` wrote under a name such as ``rows/KEY``; None if there is nothing."""
    with suppress(OSError, RuntimeError):  # nothing is there, or the user has no home
        return _file(name).read_bytes()
    return None


def store(name: str, data: bytes) -> None:
    """Write ``data`` under ``name``, all of it or nothing. Processes may do so at the same time."""
    with suppress(OSError, RuntimeError):  # a full disk, or no home
        _file(name).parent.mkdir(parents=True, exist_ok=True)
        unfinished = _file(f"{name}.{os.getpid()}")
        unfinished.write_bytes(data)
        unfinished.replace(_file(name))


def _file(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "miles", name)
