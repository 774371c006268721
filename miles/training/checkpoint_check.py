"""Check that a checkpoint is complete and unchanged, before anything of it is loaded.

Files with the hashes of a manifest are as they were written. Without a manifest, a checkpoint of an earlier version,
they are read as far as possible, for which this imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.config.components import TRAIN_BACKENDS
from miles.training import checkpoint_files as files
from miles.training.checkpoint_files import MANIFEST, STATE, CheckCost, DamagedFile, check_against_manifest
from miles.types.data_position import check_position


def check_checkpoint(folder: Path) -> CheckCost | None:
    """Check every file of the checkpoint ``folder`` against its manifest, if it has one, and read the small ones.

    Returns:
        The cost of the comparison with the manifest; None for a checkpoint of an earlier version, which has none.

    Raises:
        DamagedFile: If the checkpoint cannot be loaded as it was saved; the message names the first such file.
    """
    try:
        if not any(folder.iterdir()):
            raise DamagedFile("the folder is empty")
    except OSError as error:
        raise DamagedFile(f"the folder cannot be read ({error.strerror})") from None
    state = files.read_state(folder)
    if not {"rollouts_done", "prompts"} <= state["launcher"].keys():
        raise DamagedFile(f"{STATE} lacks the state of the run")
    try:
        check_position(state["launcher"]["prompts"])
    except ValueError as fault:
        raise DamagedFile(f"{STATE} has no position in the prompts ({fault})") from None
    done, named = state["launcher"]["rollouts_done"], files.iterations_of(folder)
    if named not in (None, done):
        raise DamagedFile(f"{STATE} is of {done} iterations, and the name of the folder says {named}")
    if state.get("manifest") and not files.has_manifest(folder):
        raise DamagedFile(f"{MANIFEST} is missing")
    cost = check_against_manifest(folder) if files.has_manifest(folder) else None
    _check_contents(folder, state, is_verified=cost is not None)
    for within in (files.critic_folder(folder), files.reference_folder(folder)):
        if not within.is_dir():
            continue
        if cost is not None:
            files.check_lists(folder, within.name)
        try:
            _check_contents(within, files.read_state(within), is_verified=cost is not None)
        except DamagedFile as fault:
            raise DamagedFile(f"{within.name}/{fault}") from None
    if not (folder / files.random_state_of(0)).is_file():
        raise DamagedFile(f"{files.random_state_of(0)} is missing")
    return cost


def check_weights(folder: Path) -> CheckCost | None:
    """Check a checkpoint whose weights alone are read: a whole one, or the reference in one (``iter_N/reference``).

    A reference has no state of a run, and its files are listed in the manifest of the checkpoint that it is in.

    Returns:
        As ``check_checkpoint``; None as well for a reference that was moved out of its checkpoint.

    Raises:
        DamagedFile: If the weights cannot be loaded as they were saved.
    """
    if not files.is_reference(folder):
        return check_checkpoint(folder)
    whole = folder.parent
    state = files.read_state(folder)
    if (whole / STATE).is_file() and files.read_state(whole).get("manifest") and not files.has_manifest(whole):
        raise DamagedFile(f"../{MANIFEST} is missing")
    cost = check_against_manifest(whole, folder.name) if files.has_manifest(whole) else None
    _check_contents(folder, state, is_verified=cost is not None)
    return cost


def _check_contents(folder: Path, state: dict[str, Any], is_verified: bool) -> None:
    """Read the small files; torch files only if no manifest has verified them."""
    backend = state.get("backend", "fsdp")
    if backend not in TRAIN_BACKENDS:
        raise DamagedFile(f"{STATE} names an unknown training backend, {backend!r}")
    for name in TRAIN_BACKENDS[backend].checkpoint_json:
        files.read_json_object(folder, name)
    if not is_verified:
        _check_tensors(folder)


def _check_tensors(folder: Path) -> None:
    from miles.training.checkpoint_io import check_files_of_index, read_index, read_tensors  # imports torch

    check_files_of_index(folder, read_index(folder))
    for path in sorted(folder.glob("*.pt")):
        tensors = read_tensors(folder, path.name)
        if files.is_random_state(path.name) and "cpu" not in tensors:
            raise DamagedFile(f"{path.name} holds no random state")
