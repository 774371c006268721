"""Copy the ends of Ray's logs out of a run's temporary folder before it is removed."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from miles.secret_values import hide_in_text

FILE_BYTES = 1_000_000  # the end of each log
TOTAL_BYTES = 20_000_000
# What says most about a death, first: beginnings of names.
_ORDER = ("raylet", "gcs_server", "worker-", "python-core-worker", "python-core-driver")


def copy_ray_logs(run_folder: Path, target: Path, secrets: Collection[str]) -> None:
    """Copy the end of each log of Ray's session to ``target``, up to ``TOTAL_BYTES`` together.

    Ray's logs hold the environment of workers. Nobody but the user can read the copies.

    Args:
        run_folder: The run's temporary folder, which has Ray's session.
        target: The folder of the copies; made if there is something to copy.
        secrets: Texts that are hidden in the copies.
    """
    left = TOTAL_BYTES
    logs = [path for path in run_folder.glob("session_2*/logs/*") if path.is_file() and not path.is_symlink()]
    for path in sorted(logs, key=lambda path: (_rank(path.name), path.name)):
        with suppress(OSError):  # it cannot be read, or was removed meanwhile
            text = _end(path, min(FILE_BYTES, left))
            if not text:
                continue
            left -= len(text)
            target.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = target / path.name
            copy.touch(mode=0o600)
            copy.write_bytes(
                hide_in_text(text.decode(errors="surrogateescape"), secrets).encode(errors="surrogateescape")
            )


def _rank(name: str) -> int:
    return next((number for number, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))


def _end(path: Path, limit: int) -> bytes:
    """Return the last whole lines of a file, at most ``limit`` bytes."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - limit))
        text = file.read(limit)
    return text if size <= limit else text.partition(b"\n")[2]
