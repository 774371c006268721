"""The folder of a run's checkpoints: each appears whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from miles.training.run_state import is_checkpoint

_NAME = re.compile(r"(\.replaced_)?iter_(\d{7})")


def staging(root: Path, rollout: int) -> Path:
    """An empty folder to write the checkpoint after ``rollout`` rollouts into; ``publish`` makes it a checkpoint.

    What a killed run left half-written there is removed.
    """
    folder = root / f".writing_iter_{rollout:07d}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish(root: Path, rollout: int) -> Path:
    """Rename the staged folder into place: the one step by which a checkpoint comes to be."""
    staged, final = root / f".writing_iter_{rollout:07d}", root / f"iter_{rollout:07d}"
    _flush(staged)
    if final.exists():
        replaced = root / f".replaced_iter_{rollout:07d}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        staged.rename(final)
        shutil.rmtree(replaced)
    else:
        staged.rename(final)
    return final


def at(path: Path) -> Path | None:
    """The checkpoint that ``path`` names: itself, or the newest in it. None where it is no folder of miles' own."""
    return path if is_checkpoint(path) else newest(path)


def newest(root: Path) -> Path | None:
    """The checkpoint of the most rollouts in ``root``, or None where there is none.

    A run killed while it replaced a checkpoint has left the older one under its ``.replaced_`` name: it counts.
    """
    if not root.is_dir():
        return None
    found = [
        (int(match[2]), match[1] is None, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return max(found)[2] if found else None


def _flush(folder: Path) -> None:
    """Have the files reach the disk before the rename does, so that a crash of the machine cannot swap their order."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
