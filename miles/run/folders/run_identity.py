"""Find the runs that the checkpoints of a folder belong to, and refuse to mix two of them.

Every checkpoint carries the id of its run. A run that resumes keeps the id of the run it continues; ``--finetune``
starts a new one. A folder of ``--save`` may hold earlier checkpoints only if the run continues from the newest of
them: anything else would leave checkpoints of two runs side by side, and a later resume would take the wrong one.

A run that begins from a checkpoint from which its run has continued is a branch: a new run, whose metrics and
checkpoints are not those of the other.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from miles.base.reading import reading
from miles.config.checkpoint import CheckpointArguments
from miles.observe.tracking.identity import RunIdentity
from miles.training import checkpoint_folder
from miles.training.checkpoint_files import DamagedFile


def check_load_folder(checkpoint: CheckpointArguments) -> list[str]:
    """Check that ``--load`` names checkpoints of one run; return notes for the user.

    Checkpoints of an earlier version name no run. If they are older than those of one run, that run has continued them,
    because no other run may save into their folder.

    Raises:
        ValueError: If the folder holds checkpoints of several runs: the newest may be another run's.
    """
    start = _loaded(checkpoint)
    if checkpoint.load is None or start is None:
        return []
    local = checkpoint.local(checkpoint.load)
    if start != local:  # a folder of checkpoints
        last = _last_of_each_run(local)
        newest = max(last, key=lambda run: checkpoint_folder.iterations_of(last[run]) or 0, default=None)
        unnamed = last.pop(None, None) if newest is not None else None
        if len(last) > 1:
            runs = "; ".join(f"{_shown(run)} up to {folder.name}" for run, folder in last.items())
            raise ValueError(
                f"--load {checkpoint.load}: holds checkpoints of {len(last)} runs ({runs}), and the newest may not be "
                f"the one you mean; name one, for example --load {checkpoint.inside(checkpoint.load, start.name)}"
            )
        if unnamed is not None:
            which = f"checkpoints up to {unnamed.name} do not say which run wrote them (an earlier version of miles)"
            return [f"--load {checkpoint.load}: {which}"]
    if _has_state(start) and _run_of(start) is None:
        return [f"--load {checkpoint.load}: {start.name} does not say which run wrote it (an earlier version of miles)"]
    return []


def branch_of(checkpoint: CheckpointArguments) -> tuple[str | None, list[str]]:
    """Return the checkpoint from which a new run branches off, None for other runs, and notes for the user.

    Args:
        checkpoint: The flags as the user gave them: a user who names a checkpoint wants that one, not the newest.
    """
    start = None if checkpoint.finetune else _loaded(checkpoint)
    if checkpoint.load is None or start is None or start != checkpoint.local(checkpoint.load):
        return None, []
    run, done = _run_of(start), checkpoint_folder.iterations_of(start)
    if run is None or done is None:
        return None, []
    later = [
        folder
        for folder in checkpoint_folder.all_in(start.parent)
        if (checkpoint_folder.iterations_of(folder) or 0) > done and _run_of(folder) == run
    ]
    if not later:
        return None, []
    note = (
        f"{run} has continued from this checkpoint, to {later[-1].name}, so this is a new run with metrics of its own"
    )
    return str(start), [f"--load {checkpoint.load}: {note}"]


def own_save_folder(checkpoint: CheckpointArguments, damaged: Collection[Path] = ()) -> CheckpointArguments:
    """Return ``checkpoint`` with a ``--save`` folder that no other run's checkpoints are in.

    With ``--start-over`` that is a new folder inside ``--save`` if needed.

    Args:
        checkpoint: The flags.
        damaged: Checkpoints that were passed over in favour of the one in ``--load`` (resume_point.py).

    Raises:
        ValueError: If ``--save`` holds checkpoints that this run does not continue from.
    """
    passed_over = {folder.resolve() for folder in damaged}
    with reading(f"--save {checkpoint.save}"):
        checkpoints = [] if checkpoint.save is None else checkpoint_folder.all_in(checkpoint.local(checkpoint.save))
    newest = next((folder for folder in reversed(checkpoints) if folder.resolve() not in passed_over), None)
    if newest is None or _continues_from(newest, checkpoint):
        return checkpoint
    assert checkpoint.save is not None
    if checkpoint.start_over:
        name = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        return replace(checkpoint, save=checkpoint.inside(checkpoint.save, name))
    raise ValueError(
        f"--save {checkpoint.save}: holds checkpoints of {_shown(_run_of(newest))}, up to {newest.name}, and this is "
        f"{_this_run(checkpoint)}; continue that run with --load {checkpoint.save} (without --finetune), give another "
        "folder, or add --start-over to save into a new folder inside it"
    )


def _this_run(checkpoint: CheckpointArguments) -> str:
    """Return which run this is, for a message: the one that it continues, by its id, or where its weights are from."""
    if checkpoint.load is None:
        return "a new run, without --load"
    if checkpoint.finetune:
        return f"a new run, with the weights of --load {checkpoint.load}"
    loaded = _loaded(checkpoint)
    if loaded is None:
        return f"a new run, as --load {checkpoint.load} holds no checkpoint"
    return f"{_shown(_run_of(loaded))}, which continues from {loaded}"


def _continues_from(newest: Path, checkpoint: CheckpointArguments) -> bool:
    loaded = None if checkpoint.finetune else _loaded(checkpoint)
    return loaded is not None and loaded.resolve() == newest.resolve()


def _loaded(checkpoint: CheckpointArguments) -> Path | None:
    """Return the checkpoint that ``--load`` names; None without one."""
    if checkpoint.load is None:
        return None
    with reading(f"--load {checkpoint.load}"):
        return checkpoint_folder.at(checkpoint.local(checkpoint.load))


def _last_of_each_run(root: Path) -> dict[RunIdentity | None, Path]:
    """Return the newest checkpoint of every run in ``root``, as far as they say."""
    return {_run_of(folder): folder for folder in checkpoint_folder.all_in(root) if _has_state(folder)}


def _has_state(folder: Path) -> bool:
    try:
        checkpoint_folder.read_launcher_state(folder)
    except DamagedFile:
        return False
    return True


def _run_of(folder: Path) -> RunIdentity | None:
    """Return the run that wrote a checkpoint; None for one that does not say: a damaged one, or of earlier versions."""
    try:
        return RunIdentity.from_state(checkpoint_folder.read_launcher_state(folder))
    except DamagedFile:
        return None


def _shown(run: RunIdentity | None) -> str:
    return "an earlier run" if run is None else str(run)
