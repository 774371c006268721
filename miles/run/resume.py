"""The settings in a checkpoint: say what a run that resumes has changed, and refuse what cannot continue.

A checkpoint has the settings of the sections that decide the result of training, without secrets. Settings of the
others, such as ``--output-dir`` and ``--worker-timeout``, may change without a note.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from miles.base.disk_faults import reading
from miles.base.flags import LONGEST_VALUE, flag_name
from miles.base.secrets import public
from miles.base.storage import is_url
from miles.base.text import InputError, one_line
from miles.config.checkpoint import CheckpointArguments
from miles.config.model import ModelArguments, fault_of_tokens, readable_config
from miles.config.settings import Settings
from miles.observe.run_files import RunIdentity
from miles.run.remote_checkpoints import RemoteCheckpoints, named_errors
from miles.tasks.data.stream import check_order
from miles.training import checkpoint_files
from miles.training.checkpoint_check import check_checkpoint, check_weights
from miles.training.checkpoint_files import DamagedFile
from miles.types.data_position import positions_in_sets

_SIZES = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
KEY = "settings"  # in the launcher's part of a checkpoint
_SECTIONS = (
    "model",
    "lora",
    "data",
    "reward",
    "rollout",
    "loss",
    "critic",
    "optimizer",
    "training",
    "parallel",
    "evaluation",
    "megatron",
    "megatron_overrides",
)
# Settings of these sections that do not decide the result of training: how names end, and whole names.
_LIMITS = ("_timeout", "_concurrency", "_retries", "_memory", "_cache", "_processes", "_workers")
_OUTPUTS = ("save_debug_rollout_data", "log_passrate", "get_mismatch_metrics", "loss_canary")
_LISTED = 8  # settings in a note


def settings_to_save(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings as a checkpoint has them: section to field to value, in plain JSON."""
    sections = {}
    for name in _SECTIONS:
        section = getattr(settings, name)
        values = dict(section) if isinstance(section, tuple) else dataclasses.asdict(section)
        sections[name] = {
            field: value for field, value in values.items() if not field.endswith(_LIMITS) and field not in _OUTPUTS
        }
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(public("settings", sections), default=str))
    return plain


def check_settings(checkpoint: CheckpointArguments, settings: Settings) -> list[str]:
    """Compare the settings with the checkpoint's in ``--load``, if the run continues that.

    Returns:
        A note with the settings that differ, if some do.

    Raises:
        ValueError: Another training backend wrote the checkpoint, its prompts were in another order, or its model had
            another tokenizer.
    """
    folder = None if checkpoint.load is None else checkpoint_files.at(checkpoint.local(checkpoint.load))
    if folder is None:
        return []
    checkpoint_files.read_run_state(folder, settings.training.train_backend, f"--load {checkpoint.load}")
    state = checkpoint_files.read_launcher_state(folder)
    before = state.get(KEY)
    other_model = _saved_model(before)
    if other_model == settings.model.hf_checkpoint:
        other_model = None
    if other_model is not None:
        _check_sizes(checkpoint, other_model, settings.model)
    if checkpoint.finetune:
        return []
    order = {"shuffle": settings.data.rollout_shuffle, "seed": settings.data.rollout_seed}
    for position in positions_in_sets(state["prompts"]):
        check_order(position, order)
    if not isinstance(before, dict):  # an earlier version
        return []
    if other_model is not None:
        _check_tokenizer(checkpoint, other_model, settings)
    differences = dict(_differences(before, settings_to_save(settings)))
    if not differences:
        return []
    changed = [_changed(name, values) for name, values in differences.items()]
    more = f"; and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
    notes = [
        f"--load {checkpoint.load}: {folder.name} was saved with other settings, and this run continues with its own: "
        f"{'; '.join(changed[:_LISTED])}{more}"
    ]
    optimizer = settings.optimizer
    if "num_rollout" in differences and optimizer.lr_decay_style != "constant" and optimizer.lr_decay_iters is None:
        notes.append("the decay of --lr ends with the run, and --num-rollout changed: the learning rate jumps")
    return notes


def _saved_model(settings: Any) -> str | None:
    """Return ``--hf-checkpoint`` of the settings in a checkpoint; None if they lack it, as in earlier versions."""
    section = settings.get("model") if isinstance(settings, dict) else None
    saved = section.get("hf_checkpoint") if isinstance(section, dict) else None
    return saved if isinstance(saved, str) else None


def _check_sizes(checkpoint: CheckpointArguments, before: str, model: ModelArguments) -> None:
    """Refuse a model whose weights have other shapes than the checkpoint's, if both models are here."""
    old, new = _language_model(replace(model, hf_checkpoint=before)), _language_model(model)
    for name in _SIZES:
        if name in old and name in new and old[name] != new[name]:
            raise InputError(
                f"--load {checkpoint.load}: holds a model with {name} {old[name]}, and --hf-checkpoint "
                f"{model.hf_checkpoint} has {new[name]}; give --hf-checkpoint {before}, or drop --load"
            )


def _language_model(model: ModelArguments) -> dict[str, Any]:
    """Return the configuration of the language model; empty if the model is not here."""
    config = readable_config(model)
    return {} if config is None else config.get("text_config") or config


def _check_tokenizer(checkpoint: CheckpointArguments, before: str, settings: Settings) -> None:
    now = settings.model.hf_checkpoint
    if now is None:
        return
    if (fault := fault_of_tokens(now, before)) is not None:
        raise ValueError(
            f"--hf-checkpoint {now}: {fault}; the run in --load {checkpoint.load} was trained with those, so give "
            f"--hf-checkpoint {before}"
        )


def _differences(before: Mapping[str, Any], now: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the fields that both have, with both values, if these differ."""
    for section, fields in now.items():
        saved = before.get(section)
        for name, value in fields.items():
            if isinstance(saved, dict) and name in saved and saved[name] != value:
                yield name, [saved[name], value]


def _changed(name: str, values: list[Any]) -> str:
    old, new = (one_line("none" if value is None else str(value), LONGEST_VALUE) for value in values)
    return f"{flag_name(name)} {old}, now {new}"


# Find the runs that the checkpoints of a folder belong to, and refuse to mix two of them.
#
# Every checkpoint carries the id of its run. A run that resumes keeps the id of the run it continues; ``--finetune``
# starts a new one. A folder of ``--save`` may hold earlier checkpoints only if the run continues from the newest of
# them: anything else would leave checkpoints of two runs in one folder, and a later resume would take the wrong one.
#
# A run that begins from a checkpoint that its run has continued from is a branch: a new run, with separate metrics and
# checkpoints.


def check_load_folder(checkpoint: CheckpointArguments) -> list[str]:
    """Check that ``--load`` names checkpoints of one run; return notes for the user.

    Checkpoints of an earlier version name no run. If they are older than the checkpoints of one run, that run has
    continued them, because no other run may save into their folder.

    Raises:
        ValueError: If the folder holds checkpoints of several runs: the newest may be another run's.
    """
    start = _loaded(checkpoint)
    if checkpoint.load is None or start is None:
        return []
    local = checkpoint.local(checkpoint.load)
    if start != local:  # a folder of checkpoints
        last = {_run_of(folder): folder for folder in checkpoint_files.all_in(local) if _has_state(folder)}
        newest = max(last, key=lambda run: checkpoint_files.iterations_of(last[run]) or 0, default=None)
        unnamed = last.pop(None, None) if newest is not None else None
        if len(last) > 1:
            runs = "; ".join(f"{_run_name(run)} up to {folder.name}" for run, folder in last.items())
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
    """Return the checkpoint that a new run branches off from, None for other runs, and notes for the user.

    Args:
        checkpoint: The flags as the user gave them: a user who names a checkpoint wants that one, not the newest.
    """
    start = None if checkpoint.finetune else _loaded(checkpoint)
    if checkpoint.load is None or start is None or start != checkpoint.local(checkpoint.load):
        return None, []
    run, done = _run_of(start), checkpoint_files.iterations_of(start)
    if run is None or done is None:
        return None, []
    later = [
        folder
        for folder in checkpoint_files.all_in(start.parent)
        if (checkpoint_files.iterations_of(folder) or 0) > done and _run_of(folder) == run
    ]
    if not later:
        return None, []
    note = f"{run} has continued from this checkpoint, to {later[-1].name}, so this is a new run with its own metrics"
    return str(start), [f"--load {checkpoint.load}: {note}"]


def own_save_folder(checkpoint: CheckpointArguments, damaged: Collection[Path] = ()) -> CheckpointArguments:
    """Return ``checkpoint`` with a ``--save`` folder that no other run's checkpoints are in.

    With ``--start-over`` that is a new folder inside ``--save`` if needed.

    Args:
        checkpoint: The flags.
        damaged: Checkpoints that were passed over in favour of the one in ``--load`` (``ResumePoint``).

    Raises:
        ValueError: If ``--save`` holds checkpoints that this run does not continue from.
    """
    passed_over = {folder.resolve() for folder in damaged}
    with reading(f"--save {checkpoint.save}"):
        checkpoints = [] if checkpoint.save is None else checkpoint_files.all_in(checkpoint.local(checkpoint.save))
    newest = next((folder for folder in reversed(checkpoints) if folder.resolve() not in passed_over), None)
    if newest is None or _continues_from(newest, checkpoint):
        return checkpoint
    assert checkpoint.save is not None
    if checkpoint.start_over:
        name = f"run-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"
        return replace(checkpoint, save=checkpoint.inside(checkpoint.save, name))
    without = " and without --finetune" if checkpoint.finetune else ""
    raise ValueError(
        f"--save {checkpoint.save}: holds checkpoints of {_run_name(_run_of(newest))}, up to {newest.name}, and this "
        f"is {_this_run(checkpoint)}; to begin again, add --start-over (a new folder inside it) or give another "
        f"folder; to continue that run, add --load {checkpoint.save}{without}"
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
    return f"{_run_name(_run_of(loaded))}, which continues from {loaded}"


def _continues_from(newest: Path, checkpoint: CheckpointArguments) -> bool:
    loaded = None if checkpoint.finetune else _loaded(checkpoint)
    return loaded is not None and loaded.resolve() == newest.resolve()


def _loaded(checkpoint: CheckpointArguments) -> Path | None:
    """Return the checkpoint that ``--load`` names; None without one."""
    if checkpoint.load is None:
        return None
    with reading(f"--load {checkpoint.load}"):
        return checkpoint_files.at(checkpoint.local(checkpoint.load))


def _has_state(folder: Path) -> bool:
    try:
        checkpoint_files.read_launcher_state(folder)
    except DamagedFile:
        return False
    return True


def _run_of(folder: Path) -> RunIdentity | None:
    """Return the run that wrote a checkpoint; None for one that does not say: a damaged one, or of earlier versions."""
    try:
        return RunIdentity.from_state(checkpoint_files.read_launcher_state(folder))
    except DamagedFile:
        return None


def _run_name(run: RunIdentity | None) -> str:
    return "an earlier run" if run is None else str(run)


# Find the checkpoint that a run starts from: the one that ``--load`` names, or the newest complete one in its folder.
#
# Every checkpoint is checked before anything starts (training/checkpoint_files.py). A damaged one is passed over with a
# note, unless ``--no-load-fallback`` forbids it or ``--load`` names that checkpoint itself. If all are damaged the run
# stops: starting from the beginning in silence would lose what was trained.


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
        is_checkpoint = checkpoint_files.is_checkpoint(root)
        folders = checkpoint_files.all_in(root)
    if is_checkpoint:
        try:
            note = _fetch_and_check(root, flag, remote)
        except DamagedFile as fault:
            raise ValueError(f"{flag}: this checkpoint is damaged: {fault}; give another one") from None
        return ResumePoint(replace(checkpoint, load=str(root)), notes=(note,))
    faults: dict[Path, DamagedFile] = {}
    for folder in reversed(folders):
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
        if checkpoint_files.iterations_of(root) is not None:
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
    reason = "there is no such folder" if is_missing else "holds no checkpoint"
    return f"{flag}: {reason}, so the run starts from the beginning"


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
            folder = None if path is None else checkpoint_files.at(Path(path))
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
