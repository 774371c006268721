"""Files of a checkpoint or an export: write them through to the disk, and read the small ones without trusting them."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.config.rollout import PLACEHOLDER


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

    If ``folder`` exists, the new one takes its place in two renames, and gets its other files: all but weights and
    files of the names that the new one has. Whenever this is killed, the older or the new one is complete, in
    ``folder``, or in ``.replaced_*`` or ``.writing_*`` beside it. The next call, or ``recover_exports``, puts it there.
    """
    folder = folder.resolve()  # a link stays, and what it names is replaced
    _recover(folder)
    staged, replaced = _staged(folder), _replaced(folder)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    yield staged
    sync_tree(staged)
    if folder.exists():
        folder.rename(replaced)
        try:
            staged.rename(folder)
        except OSError:
            replaced.rename(folder)
            raise
    else:
        staged.rename(folder)
    sync(folder.parent)
    _recover(folder)


def recover_exports(template: str) -> None:
    """Put into place what a killed run has left of exports of this name, in which ``{iteration}`` is any number.

    What is half-written stays until the next export of the same name, as another run may be writing it.
    """
    parts = PLACEHOLDER.split(str(Path(template).resolve()))
    pattern = re.compile(r"\d+".join(map(re.escape, parts)))
    parent = os.path.dirname("*".join(map(glob.escape, parts)))
    for found in glob.glob(f"{parent}/.replaced_*"):
        path = Path(found)
        exported = path.with_name(path.name.removeprefix(".replaced_"))
        if pattern.fullmatch(str(exported)):
            _recover(exported)


def _recover(folder: Path) -> None:
    """Finish what ``appearing_whole`` was killed in, so that ``folder`` is complete."""
    staged, replaced = _staged(folder), _replaced(folder)
    if not replaced.is_dir():
        return
    if not folder.exists():  # killed between the two renames, so the new one is complete
        (staged if staged.is_dir() else replaced).rename(folder)
        sync(folder.parent)
    if replaced.is_dir():
        for path in replaced.iterdir():
            is_weights = ".safetensors" in path.name and not path.is_dir()
            if not is_weights and not (folder / path.name).exists():
                path.rename(folder / path.name)
        sync(folder)
        shutil.rmtree(replaced)
        sync(folder.parent)


def _staged(folder: Path) -> Path:
    return folder.with_name(f".writing_{folder.name}")


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".replaced_{folder.name}")


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
