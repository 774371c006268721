"""Find the checkpoint that a run starts from: the one that ``--load`` names, or the newest complete one in its folder.

Every checkpoint is checked before anything starts (training/checkpoint_check.py). A damaged one is passed over with a
note, unless ``--no-load-fallback`` forbids it or ``--load`` names that checkpoint itself. If all are damaged the run
stops: starting from the beginning in silence would lose what was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from miles.base.reading import reading
from miles.base.remote_folder import is_url
from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments
from miles.run.folders.remote_checkpoints import RemoteCheckpoints, named_errors
from miles.training import checkpoint_folder
from miles.training.checkpoint_check import check_checkpoint, check_weights
from miles.training.checkpoint_files import DamagedFile


@dataclass(frozen=True)
class ResumePoint:
    """The flags with ``--load`` naming one checkpoint, the damaged ones that were passed over, and notes for the user.

    ``checkpoint`` is as given if there is nothing to load.
    """

    checkpoint: CheckpointArguments
    damaged: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def resume_point(checkpoint: CheckpointArguments) -> ResumePoint:
    """Find the checkpoint to load, and check it.

    Raises:
        ValueError: If the checkpoint is damaged, and there is no other or none may be taken.
    """
    if checkpoint.load is None:
        return ResumePoint(checkpoint)
    root = checkpoint.local(checkpoint.load)
    flag = f"--load {checkpoint.load}"
    remote = RemoteCheckpoints.of(checkpoint, checkpoint.load) if is_url(checkpoint.load) else None
    with reading(flag):
        is_checkpoint, found = checkpoint_folder.is_checkpoint(root), checkpoint_folder.all_in(root)
    if is_checkpoint:
        try:
            note = _fetch_and_check(root, flag, remote)
        except DamagedFile as fault:
            raise ValueError(f"{flag}: this checkpoint is damaged: {fault}; give another one") from None
        return ResumePoint(replace(checkpoint, load=str(root)), notes=(note,))
    faults: dict[Path, DamagedFile] = {}
    for folder in reversed(found):
        try:
            note = _fetch_and_check(folder, flag, remote)
        except DamagedFile as fault:
            if checkpoint.no_load_fallback:
                raise ValueError(
                    f"{flag}: the newest checkpoint {folder.name} is damaged: {fault}; drop --no-load-fallback to "
                    "continue from the newest complete one, or name a checkpoint"
                ) from None
            faults[folder] = fault
        else:
            skipped = (f"{flag}: {path.name} is damaged and was passed over: {fault}" for path, fault in faults.items())
            return ResumePoint(replace(checkpoint, load=str(folder)), tuple(faults), (*skipped, note))
    if not faults:
        if checkpoint_folder.iterations_of(root) is not None:
            raise ValueError(
                f"{flag}: there is no such checkpoint; give another one, or the folder of the checkpoints, whose "
                "newest is taken"
            )
        return ResumePoint(checkpoint, notes=(_note_of_nothing(checkpoint, root, flag),))
    listed = "; ".join(f"{path.name}: {fault}" for path, fault in faults.items())
    raise ValueError(
        f"{flag}: no checkpoint in it is complete ({listed}); restore one from a copy, or drop --load and give another "
        "--save folder to start from the beginning"
    )


def _note_of_nothing(checkpoint: CheckpointArguments, root: Path, flag: str) -> str:
    """Return the note of a run that has nothing to load, as the first of a job whose ``--load`` is its ``--save``.

    Raises:
        ValueError: The run needs a checkpoint (``--finetune``).
    """
    if checkpoint.finetune:
        raise ValueError(
            f"{flag}: --finetune wants the weights of a checkpoint, and there is none; check the path, or drop "
            "--finetune and --load to start from --hf-checkpoint"
        )
    is_missing = not is_url(str(checkpoint.load)) and not root.is_dir()
    found = "there is no such folder" if is_missing else "holds no checkpoint"
    is_own = checkpoint.save is not None and root.resolve() == checkpoint.local(checkpoint.save).resolve()
    check = "" if is_own else "; check the path if it was to continue another"
    return f"{flag}: {found}, so the run starts from the beginning{check}"


def check_frozen_models(model: ModelArguments) -> list[str]:
    """Check the checkpoints that ``--ref-load`` and ``--opd-teacher-load`` name, if they do; return notes for the user.

    Either may name the reference in a checkpoint, ``iter_N/reference``.

    Raises:
        ValueError: If one is damaged. No other is taken: the KL would be measured to another model.
    """
    notes = []
    for name, path in (("--ref-load", model.ref_load), ("--opd-teacher-load", model.opd_teacher_load)):
        flag = f"{name} {path}"
        with reading(flag):
            folder = None if path is None else checkpoint_folder.at(Path(path))
        if folder is None:
            continue
        try:
            notes.append(_check(folder, flag, weights_alone=True))
        except DamagedFile as fault:
            raise ValueError(f"{flag}: the checkpoint {folder.name} is damaged: {fault}; give another one") from None
    return notes


def _fetch_and_check(folder: Path, flag: str, remote: RemoteCheckpoints | None) -> str:
    if remote is not None:
        with named_errors(flag):
            remote.fetch(folder)
    return _check(folder, flag)


def _check(folder: Path, flag: str, weights_alone: bool = False) -> str:
    cost = check_weights(folder) if weights_alone else check_checkpoint(folder)
    if cost is None:
        return f"{flag}: {folder.name} has no manifest (an earlier version of miles), so its files are not verified"
    return f"{flag}: {folder.name} is complete ({cost})"
