"""The folder of a run's checkpoints, and what each checkpoint of any backend holds besides tensors.

``--save`` has one folder per checkpoint. Each appears whole or not at all::

    iter_0000004/        a checkpoint after 4 iterations
        manifest.json        size and hash of every other file (checkpoint_manifest.py)
        state.json           which backend wrote it, the launcher's state, the learning rate's schedule
        random_state_rank*.pt
        critic/              model, optimizer and state.json of the critic, if there is one
        reference/           model and state.json of a reference that follows the policy (--ref-update-interval)
        …                    the backend's tensors
    .writing_iter_…      being written
    .removing_iter_…     being removed (checkpoint_pruning.py)
    .replaced_iter_…     was there before, until the new one is in place

If ``--save`` is in remote storage (run/folders/remote_checkpoints.py), this is the local copy of it. A checkpoint
that is only there has the file ``.only-remote`` here, ``state.json`` and ``manifest.json``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from miles.config.checkpoint import checkpoint_name
from miles.training.checkpoint_files import DamagedFile, read_json_object, sync, sync_tree, write_through
from miles.training.checkpoint_manifest import FileRecord, write_manifest

_NAME = re.compile(r"(\.replaced_)?iter_(\d{7})")
_UNFINISHED = re.compile(r"\.(writing_|removing_(\.replaced_)?)iter_\d{7}")
STATE = "state.json"
ONLY_REMOTE = ".only-remote"


def random_state_of(rank: int) -> str:
    """Return the name of the file with the random state of ``rank``."""
    return f"random_state_rank{rank}.pt"


def is_random_state(name: str) -> bool:
    """Return whether a file of a checkpoint has the random state of a rank."""
    return name.startswith("random_state_rank")


def staging(root: Path, iterations_done: int) -> Path:
    """Return an empty folder to write a checkpoint into; ``publish`` makes it one."""
    root.mkdir(parents=True, exist_ok=True)
    remove_unfinished(root)
    _remove_replaced(root)
    folder = staging_path(root, iterations_done)
    folder.mkdir()
    return folder


def publish(root: Path, iterations_done: int, known: Mapping[str, FileRecord] | None = None) -> Path:
    """Write the manifest and rename the staged folder into place: the one step by which a checkpoint appears.

    Everything is on the disk before the rename, and the rename when this returns, so that a crash of the machine leaves
    a complete checkpoint or none.

    Args:
        root: The folder of the run's checkpoints.
        iterations_done: Names the checkpoint.
        known: Records of files that are hashed already, by their path in the checkpoint.
    """
    staged, final = staging_path(root, iterations_done), checkpoint_path(root, iterations_done)
    write_manifest(staged, known or {})
    sync_tree(staged)
    if final.exists():
        replaced = root / f".replaced_{checkpoint_name(iterations_done)}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        staged.rename(final)
        sync(root)
        shutil.rmtree(replaced)
    else:
        staged.rename(final)
    sync(root)
    return final


def remove_unfinished(root: Path) -> list[str]:
    """Remove what a killed run has left half-written or half-removed in ``root``, and return the names.

    Only the run that holds the lock of ``root`` (base/folder_lock.py) may call it.
    """
    unfinished = [path for path in root.iterdir() if _UNFINISHED.fullmatch(path.name)] if root.is_dir() else []
    for path in unfinished:
        _remove_tree(path)
    return sorted(path.name for path in unfinished)


def _remove_replaced(root: Path) -> None:
    """Remove checkpoints whose replacements are in place: a run was killed in between."""
    for path in root.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is not None and match[1] is not None and (root / f"iter_{match[2]}").is_dir():
            shutil.rmtree(path)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It disappears at once: if this is killed, the rest of it is no checkpoint."""
    removed = folder.with_name(f".removing_{folder.name}")
    shutil.rmtree(removed, ignore_errors=True)
    folder.rename(removed)
    sync(folder.parent)
    _remove_tree(removed)


def _remove_tree(folder: Path) -> None:
    """Remove ``folder``. A thread that prunes may remove the same one meanwhile, so files may be gone already."""

    def ignore_gone(_: object, __: str, error: tuple[type[BaseException], BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            raise error[1]

    shutil.rmtree(folder, onerror=ignore_gone)


def checkpoint_path(root: Path, iterations_done: int) -> Path:
    """Return the folder that ``publish`` makes a checkpoint."""
    return root / checkpoint_name(iterations_done)


def staging_path(root: Path, iterations_done: int) -> Path:
    """Return the folder that ``staging`` creates."""
    return root / f".writing_{checkpoint_name(iterations_done)}"


def bytes_being_written(root: Path) -> int | None:
    """Return the bytes of the next checkpoint in ``root`` that are written so far; None if none is being written."""
    found = None
    for folder in root.glob(".writing_iter_*"):
        with suppress(FileNotFoundError):  # the folder was renamed meanwhile: it is complete
            for path in folder.rglob("*"):
                with suppress(FileNotFoundError):  # only this file was renamed
                    found = (found or 0) + path.stat().st_size * path.is_file()
    return found


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
    checkpoints = [
        (int(match[2]), match[1] is None, path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))
    ]
    return [path for _, _, path in sorted(checkpoints)]


def iterations_of(folder: Path) -> int | None:
    """Return the number of iterations in the name of a checkpoint; None for a folder of another name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[2])


def is_checkpoint(folder: Path) -> bool:
    """Return whether ``folder`` is one checkpoint of a run, not a Hugging Face folder or a folder of checkpoints.

    A folder with the name of a checkpoint is one, however damaged.
    """
    if (folder / STATE).is_file():
        return True
    return _NAME.fullmatch(folder.name) is not None and folder.is_dir() and not (folder / "config.json").is_file()


def is_only_remote(folder: Path) -> bool:
    """Return whether the files of a checkpoint are in remote storage, and ``folder`` only describes them."""
    return (folder / ONLY_REMOTE).is_file()


def remote_fault(folder: Path) -> str | None:
    """Return why a checkpoint that is only in remote storage is not complete there, by its file sizes; None if it is.

    The file ``.only-remote`` has the words.
    """
    return (folder / ONLY_REMOTE).read_text(encoding="utf-8") or None


def critic_folder(folder: Path) -> Path:
    """Return the place of the critic in the checkpoint ``folder``."""
    return folder / "critic"


def saved_critic(folder: Path) -> Path:
    """Return the same, to be read. Raises ``ValueError`` for a checkpoint of a run without a critic."""
    critic = critic_folder(folder)
    if not critic.is_dir():
        raise ValueError(
            f"--load {folder.parent}: {folder.name} has no critic, and --advantage-estimator ppo needs one; start from "
            "the model that --save-hf exported, as --hf-checkpoint, or load a checkpoint of a run with a critic"
        )
    return critic


def reference_folder(folder: Path) -> Path:
    """Return the place of a reference that follows the policy in the checkpoint ``folder``."""
    return folder / "reference"


def is_reference(folder: Path) -> bool:
    """Return whether ``folder`` is the reference in a checkpoint, which has weights and no state of a run."""
    return folder == reference_folder(folder.parent)


def whole_of(folder: Path) -> Path:
    """Return the checkpoint that ``folder`` belongs to: itself, or the one that has it as its reference."""
    return folder.parent if is_reference(folder) else folder


def saved_reference(folder: Path, interval: int | None, reads_reference: bool) -> Path | None:
    """Return the reference in ``folder`` for a run to load; None if it starts from ``--ref-load``, as with a new flag.

    Args:
        folder: The checkpoint.
        interval: ``--ref-update-interval`` of this run.
        reads_reference: Whether this run has a reference.

    Raises:
        ValueError: The checkpoint's reference has followed the policy, and this run would compare with another one.
    """
    reference = reference_folder(folder)
    if not reference.is_dir():
        return None
    if interval is None and reads_reference:
        raise ValueError(
            f"--load {folder.parent}: the reference of {folder.name} has followed the policy, and this run would "
            f"compare with that of --ref-load; add --ref-update-interval, or give {reference} as --ref-load to a "
            "new run that starts from its weights with --finetune"
        )
    return reference if interval is not None else None


def write_run_state(folder: Path, backend: str, launcher: dict[str, Any], schedule: dict[str, Any]) -> None:
    """Write ``state.json``; rank 0 calls it. ``launcher`` and ``schedule`` must be plain JSON."""
    state = {"backend": backend, "launcher": launcher, "schedule": schedule, "manifest": True}
    write_through(folder / STATE, json.dumps(state).encode())


def read_state(folder: Path) -> dict[str, Any]:
    """Return what ``write_run_state`` wrote. Raises ``DamagedFile`` if it is malformed."""
    state = read_json_object(folder, STATE)
    launcher, schedule = read_launcher_state(folder), state.get("schedule")
    if not isinstance(schedule, dict):
        raise DamagedFile(f"{STATE} lacks the learning rate's schedule")
    for name, number in (
        ("rollouts_done", launcher.get("rollouts_done", 0)),
        ("steps_done", schedule.get("steps_done")),
    ):
        if type(number) is not int or number < 0:
            raise DamagedFile(f"{STATE} has a malformed {name} ({str(number)[:20]!r})")
    return state


def read_launcher_state(folder: Path) -> dict[str, Any]:
    """Return the launcher's part of ``state.json``. Raises ``DamagedFile`` if it is malformed."""
    launcher = read_json_object(folder, STATE).get("launcher")
    if not isinstance(launcher, dict):
        raise DamagedFile(f"{STATE} lacks the state of the run")
    return launcher


def read_run_state(folder: Path, backend: str, flag: str) -> dict[str, Any]:
    """Return what ``write_run_state`` wrote.

    Raises:
        ValueError: If it is malformed, or another backend wrote it; the message names ``flag``.
    """
    try:
        state = read_state(folder)
    except DamagedFile as fault:
        raise ValueError(f"{flag}: the checkpoint {folder} is damaged: {fault}; give another one") from None
    written_by = state.get("backend", "fsdp")
    if written_by != backend:
        raise ValueError(
            f"{flag}: the checkpoint {folder.name} was written by --train-backend {written_by}, whose format "
            f"--train-backend {backend} does not read; continue with {written_by}, or export its weights with "
            "--save-hf and start from them with --hf-checkpoint"
        )
    return state
