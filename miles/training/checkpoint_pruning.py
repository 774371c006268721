"""Choose the checkpoints of a run that stay, and remove the others (``--save-keep-last``, ``--save-retain-interval``).

A checkpoint stays if it is one of the newest N complete ones, or if its iterations are a multiple of K. With only the
interval, the newest complete one stays too. So a run always keeps one that it can resume from. Not counted and not
removed are damaged checkpoints, those of more iterations than the one that was just saved (a run that resumed from an
older one has passed them over as damaged), those that ``--ref-load`` and ``--opd-teacher-load`` name, and the best one.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from miles.training.checkpoint_files import DamagedFile
from miles.training.checkpoint_folder import all_in, is_only_remote, iterations_of, remote_fault, remove
from miles.training.checkpoint_manifest import check_sizes


def prune(saved: Path, keep_last: int | None, retain_interval: int | None, in_use: Collection[Path] = ()) -> list[str]:
    """Remove the checkpoints beside ``saved`` that are not kept, oldest first, and return their names.

    Only the run that holds the lock of that folder may call it.

    Args:
        saved: The checkpoint that the run has just published.
        keep_last: How many of the newest complete checkpoints stay; None: one, if there is an interval.
        retain_interval: Checkpoints after a multiple of so many iterations stay too; None: none.
        in_use: Checkpoints that the run reads at every start, and the best one.

    Raises:
        OSError: A checkpoint cannot be removed.
    """
    if keep_last is None and retain_interval is None:
        return []
    done = _iterations(saved)
    known = [folder for folder in all_in(saved.parent) if _iterations(folder) <= done]
    complete = [folder for folder in known if is_complete(folder)]
    removed = []
    for folder in complete[: -(keep_last or 1)]:
        is_used = folder.resolve() in (path.resolve() for path in in_use)
        if not is_used and (retain_interval is None or _iterations(folder) % retain_interval):
            remove(folder)
            removed.append(folder.name)
    return removed


def _iterations(folder: Path) -> int:
    iterations = iterations_of(folder)
    assert iterations is not None, "a checkpoint of a run is named by its iterations"
    return iterations


def is_complete(folder: Path) -> bool:
    """Return whether every file of a checkpoint is there, or in remote storage, and has the size that was saved."""
    if is_only_remote(folder):
        return remote_fault(folder) is None
    try:
        check_sizes(folder)
    except DamagedFile:
        return False
    return True
