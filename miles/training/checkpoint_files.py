"""Files of a checkpoint or an export: write them through to the disk, and read the small ones without trusting them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DamagedFile(ValueError):
    """A file of a checkpoint is missing, or holds something other than what was saved. The message names the file."""


def write_through(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write ``data``, or its pieces, to ``path`` and return when it is on the disk."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Return when everything in ``folder`` is on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir() or path.is_file():
            sync(path)
    sync(folder)


@contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to write into, which becomes ``folder`` when the block ends without an error.

    If ``folder`` exists, its weights are removed and the new files replace those of the same name, ``config.json``
    last; other files stay.
    """
    staged = folder.with_name(f".writing_{folder.name}")
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    yield staged
    sync_tree(staged)
    if not folder.exists():
        staged.rename(folder)
    else:
        for old in folder.glob("*.safetensors*"):
            old.unlink()
        for path in sorted(staged.iterdir(), key=lambda path: path.name == "config.json"):
            if path.is_dir():  # a folder takes the place of an empty one only
                shutil.rmtree(folder / path.name, ignore_errors=True)
            path.replace(folder / path.name)
        staged.rmdir()
        sync(folder)
    sync(folder.parent)


def read_bytes(folder: Path, name: str) -> bytes:
    """Return the content of a file. Raises ``DamagedFile`` if it cannot be read or is empty."""
    try:
        data = (folder / name).read_bytes()
    except FileNotFoundError:
        raise DamagedFile(f"{name} is missing") from None
    except OSError as error:
        raise DamagedFile(f"{name} cannot be read ({error.strerror})") from None
    if not data:
        raise DamagedFile(f"{name} is empty")
    return data


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in the file ``name`` in ``folder``. Raises ``DamagedFile`` for anything else."""
    data = read_bytes(folder, name)
    try:
        found = json.loads(data)
    except RecursionError:
        raise DamagedFile(f"{name} is not a JSON object (nested too deeply)") from None
    except ValueError as error:
        raise DamagedFile(f"{name} is not valid JSON ({in_one_line(error)})") from None
    if not isinstance(found, dict):
        raise DamagedFile(f"{name} is not a JSON object")
    return found


def in_one_line(error: BaseException) -> str:
    """Return the first line of an error's message, at most 200 characters, or the name of its type."""
    lines = str(error).split("\n")
    return "".join(c for c in lines[0][:200] if c.isprintable()) or type(error).__name__
