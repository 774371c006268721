"""The folder of a run's checkpoints, and what each checkpoint of any backend holds besides tensors.

``--save`` has one folder per checkpoint. Each appears whole or not at all::

    iter_0000004/        a checkpoint after 4 iterations
        state.json           which backend wrote it, the launcher's state, the learning rate's schedule
        random_state_rank*.pt
        critic/              model, optimizer and state.json of the critic, if there is one
        …                    the backend's tensors
    .writing_iter_…      being written
    .replaced_iter_…     was there before, until the new one is in place
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_NAME = re.compile(r"(\.replaced_)?iter_(\d{7})")
STATE = "state.json"


def staging(root: Path, iterations_done: int) -> Path:
    """Return an empty folder to write a checkpoint into; ``publish`` makes it one.

    What a killed run left half-written there is removed.
    """
    folder = root / f".writing_iter_{iterations_done:07d}"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish(root: Path, iterations_done: int) -> Path:
    """Rename the staged folder into place: the one step by which a checkpoint appears."""
    staged, final = root / f".writing_iter_{iterations_done:07d}", root / f"iter_{iterations_done:07d}"
    _flush(staged)
    if final.exists():
        replaced = root / f".replaced_iter_{iterations_done:07d}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        staged.rename(final)
        shutil.rmtree(replaced)
    else:
        staged.rename(final)
    return final


def at(path: Path) -> Path | None:
    """Return the checkpoint that ``path`` names: itself, or the newest in it; None for any other folder."""
    return path if is_checkpoint(path) else newest(path)


def newest(root: Path) -> Path | None:
    """Return the checkpoint of the most iterations in ``root``, or None if there is none.

    A run killed while it replaced a checkpoint has left the older one under its ``.replaced_`` name: it counts.
    """
    return next(reversed(all_in(root)), None)


def all_in(root: Path) -> list[Path]:
    """Return all checkpoints in ``root``, by their iterations, replaced ones before those that replace them."""
    if not root.is_dir():
        return []
    found = [
        (int(match[2]), match[1] is None, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(found)]


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is one checkpoint of a run, not a Hugging Face folder or a folder of checkpoints."""
    return (folder / STATE).is_file()


def critic_folder(folder: Path) -> Path:
    """Return the place of the critic in the checkpoint ``folder``."""
    return folder / "critic"


def saved_critic(folder: Path) -> Path:
    """Return the same, to be read. Raises ``ValueError`` for a checkpoint of a run without a critic."""
    found = critic_folder(folder)
    if not found.is_dir():
        raise ValueError(
            f"--load {folder.parent}: {folder.name} has no critic, and --advantage-estimator ppo needs one; start from "
            "the model that --save-hf exported, as --hf-checkpoint, or load a checkpoint of a run with a critic"
        )
    return found


def write_run_state(folder: Path, backend: str, launcher: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Write ``state.json``; rank 0 calls it. ``launcher`` and ``schedule`` must be plain JSON."""
    state = {"backend": backend, "launcher": launcher, "schedule": schedule}
    (folder / STATE).write_text(json.dumps(state))


def read_run_state(folder: Path, backend: str, flag: str) -> dict[str, Any]:
    """Return what ``write_run_state`` wrote. Raises ``ValueError`` naming ``flag`` if another backend wrote it."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text())
    written_by = state.get("backend", "fsdp")
    if written_by != backend:
        raise ValueError(
            f"{flag}: the checkpoint {folder.name} was written by --train-backend {written_by}, whose format "
            f"--train-backend {backend} does not read; continue with {written_by}, or export its weights with "
            "--save-hf and start from them with --hf-checkpoint"
        )
    return state


def write_random_state(folder: Path, more: dict[str, torch.Tensor] | None = None) -> None:
    """Write the states of PyTorch's generators, and ``more`` of the backend's own by name. Every rank calls it."""
    state = {"cpu": torch.get_rng_state(), **(more or {})}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, _random_file(folder))


def restore_random_state(folder: Path) -> dict[str, torch.Tensor]:
    """Read what ``write_random_state`` wrote; returns ``more``. Every rank calls it.

    A rank that the saving run did not have keeps its own seed, and gets nothing.
    """
    if not _random_file(folder).exists():
        return {}
    state: dict[str, torch.Tensor] = torch.load(_random_file(folder), weights_only=True)
    torch.set_rng_state(state.pop("cpu"))
    cuda = state.pop("cuda", None)
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    return state


def _random_file(folder: Path) -> Path:
    return folder / f"random_state_rank{dist.get_rank()}.pt"


def _flush(folder: Path) -> None:
    """Write the files through to the disk before the rename, so that a crash of the machine cannot swap their order."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
