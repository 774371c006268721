"""Turn the flags of a launch script into settings that the validator accepts, and say what was changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.base.flags import Errors, flag_name
from miles.base.storage import is_url
from miles.compat.launch.distillation import normalize_teacher
from miles.compat.launch.foreign import Foreign, by_flag
from miles.compat.launch.launcher_flags import CKPT_STEP, LAUNCHER_FLAGS
from miles.compat.launch.megatron import normalize_megatron
from miles.compat.launch.megatron_flags import MEGATRON_SCRIPT_FLAGS
from miles.compat.launch.multi_turn import normalize_multi_turn
from miles.compat.launch.newer_flags import NEWER_FLAGS
from miles.compat.launch.paths import (
    CONSTANT_OF_REDUCER,
    HOOKS,
    is_constant_reducer,
    is_fully_async,
    missing_function,
    our_function,
)
from miles.compat.launch.server import normalize_server_flags
from miles.compat.launch.training_flags import TRAINING_FLAGS
from miles.config.abilities import reads_megatron_flags
from miles.config.checkpoint import checkpoint_name
from miles.config.megatron.rules import lacks_bridge
from miles.config.model import readable_config
from miles.config.no_effect import normalize_idle, normalize_values
from miles.config.notes import NO_EFFECT, READ_AS, Note, note_on, overruled, written
from miles.config.settings import Settings
from miles.models.registry import CONVERTED
from miles.objective.aggregation import MODE_FLAGS

_CONVERTED = "_torch_dist"  # the ending that converters of related launchers give to a folder

FOREIGN_FLAGS: dict[str, Foreign] = by_flag(
    [
        *LAUNCHER_FLAGS.values(),
        *NEWER_FLAGS.values(),
        *MEGATRON_SCRIPT_FLAGS.values(),
        *TRAINING_FLAGS.values(),
    ]
)


def normalize_flags(
    settings: Settings, foreign: Mapping[str, Any], errors: Errors, given: Collection[str] = ()
) -> tuple[Settings, list[Note]]:
    """Replace what has another name here, and drop what changes nothing.

    Args:
        settings: The settings, as they were given.
        foreign: The flags of ``FOREIGN_FLAGS`` in the command, with their values; True for a switch.
        errors: Collects what would change the result, and cannot be obeyed.
        given: The fields that the command sets, even if to their defaults.

    Returns:
        The settings to validate, and a note on every flag that was replaced or dropped.
    """
    settings, notes = normalize_teacher(settings, errors)
    settings, foreign, found = normalize_multi_turn(settings, foreign, errors)
    notes += found
    settings, foreign, found = _normalize_step(settings, foreign, errors)
    notes += found
    judged = (FOREIGN_FLAGS[flag].judge(value, settings, foreign, errors) for flag, value in foreign.items())
    notes += [note for note in judged if note is not None]
    settings, found = _normalize_paths(settings, errors, given)
    notes += found
    if "async_steps" not in given:  # the validator refuses 0 if it was asked for
        settings, found = _normalize_async_steps(settings)
        notes += found
    settings, found = _normalize_converter(settings)
    notes += found
    settings, found = normalize_megatron(settings, errors)
    notes += found
    for step in (normalize_values, _normalize_reference, normalize_idle, normalize_server_flags):
        settings, found = step(settings)
        notes += found
    return _without_other_copy(settings, errors), notes


def _normalize_step(
    settings: Settings, foreign: Mapping[str, Any], errors: Errors
) -> tuple[Settings, Mapping[str, Any], list[Note]]:
    """Read ``--load FOLDER --ckpt-step N`` as the folder of that checkpoint, which must be there.

    A folder without checkpoints begins a run, so a wrong number would begin one without a word.
    """
    step, folder = str(foreign.get(CKPT_STEP, "")), settings.checkpoint.load
    if not step.isdecimal():
        return settings, foreign, []  # the table of flags refuses it
    others = {flag: value for flag, value in foreign.items() if flag != CKPT_STEP}
    if folder is None:
        return settings, others, [Note(NO_EFFECT, written(CKPT_STEP, step), "without --load")]
    path = settings.checkpoint.inside(folder, checkpoint_name(int(step)))
    if not is_url(path) and not Path(path).is_dir():
        rule = f"there is no folder {path}"
        errors.add(f"{CKPT_STEP} {step}: {rule}; drop it to load the newest checkpoint of --load {folder}")
        return settings, others, []
    note = Note(READ_AS, written(CKPT_STEP, step), f"--load {path}")
    return replace(settings, checkpoint=replace(settings.checkpoint, load=path)), others, [note]


def _normalize_paths(settings: Settings, errors: Errors, given: Collection[str]) -> tuple[Settings, list[Note]]:
    """Replace functions of related launchers by ours; refuse those that have no counterpart."""
    notes = list[Note]()
    for field, hook in HOOKS.items():
        section = getattr(settings, hook.section)
        path = getattr(section, field)
        if path is None:
            continue
        if is_fully_async(field, path):
            steps = settings.rollout.async_steps if "async_steps" in given else 1
            notes.append(note_on(READ_AS, field, path, f"--fully-async --async-steps {steps}"))
            ahead = replace(settings.rollout, rollout_function_path=None, fully_async=True, async_steps=steps)
            settings = replace(settings, rollout=ahead)
            continue
        if is_constant_reducer(field, path):
            notes += overruled(section, MODE_FLAGS, given, by=written(flag_name(field), path))
            plain = {name: getattr(type(section), name) for name in (field, *MODE_FLAGS)}
            constant = {"loss_aggregation": "constant", "loss_aggregation_divisor": CONSTANT_OF_REDUCER}
            settings = replace(settings, loss=replace(section, **plain | constant))
            why = f"--loss-aggregation constant --loss-aggregation-divisor {CONSTANT_OF_REDUCER:g}"
            notes.append(note_on(READ_AS, field, path, why))
            continue
        is_known, ours = our_function(field, path, settings.reads_conversations)
        if is_known:
            notes.append(note_on(READ_AS, field, path, ours or "what the run does without it"))
            settings = replace(settings, **{hook.section: replace(section, **{field: ours})})
        elif field == "dynamic_sampling_filter_path" and settings.rollout.rollout_function_path is not None:
            continue  # no filter is called beside that function: the validator says so
        elif (message := missing_function(field, path)) is not None:
            errors.add(message)
    return settings, notes


def _normalize_async_steps(settings: Settings) -> tuple[Settings, list[Note]]:
    if not settings.rollout.fully_async or settings.rollout.async_steps:
        return settings, []
    note = note_on(READ_AS, "fully_async", True, "--fully-async --async-steps 1, the least age of samples")
    return replace(settings, rollout=replace(settings.rollout, async_steps=1)), [note]


def _normalize_reference(settings: Settings) -> tuple[Settings, list[Note]]:
    """Read a converted copy of ``--hf-checkpoint`` as that model itself; no copy is needed here.

    Such scripts name ``MODEL`` and ``MODEL_torch_dist``. Another folder is another reference, and stays.
    """
    reference, model = settings.model.ref_load, settings.model.hf_checkpoint
    if reference is None or model is None or not settings.loss.needs_reference:
        return settings, []
    if Path(reference).name != Path(model).name + _CONVERTED:
        return settings, []
    why = f"--hf-checkpoint {model}, whose converted copy it is by its name"
    return (
        replace(settings, model=replace(settings.model, ref_load=None)),
        [note_on(READ_AS, "ref_load", reference, why)],
    )


def _without_other_copy(settings: Settings, errors: Errors) -> Settings:
    """Refuse a converted copy of another model than ``--hf-checkpoint``: their checkpoints are not read here."""
    path = settings.model.ref_load
    if path is None or not Path(path).name.endswith(_CONVERTED) or _holds_checkpoints_of_ours(Path(path)):
        return settings
    rule = "by its name a copy that a related launcher has converted, which is not read here"
    given = settings.model.hf_checkpoint
    what_to_do = f"give the Hugging Face folder that it was made from, or drop it to compare with {given}"
    errors.refuse("ref_load", path, rule, what_to_do)
    return replace(settings, model=replace(settings.model, ref_load=None))


def _holds_checkpoints_of_ours(folder: Path) -> bool:
    return any(folder.glob("manifest.json")) or any(folder.glob("*/manifest.json")) or (folder / "config.json").exists()


def _normalize_converter(settings: Settings) -> tuple[Settings, list[Note]]:
    """Convert weights without Megatron-Bridge if it is not there, or an adapter is trained, and the family is known."""
    mode = settings.megatron.megatron_to_hf_mode
    if mode != "bridge" or not reads_megatron_flags(settings) or settings.model.hf_checkpoint is None:
        return settings, []
    config = readable_config(settings.model)
    if config is None or config.get("model_type") not in CONVERTED:
        return settings, []
    if not settings.lora.trains_adapter and not lacks_bridge():
        return settings, []
    why = "raw: miles converts this family itself, to the same weights"
    return (
        replace(settings, megatron=replace(settings.megatron, megatron_to_hf_mode="raw")),
        [note_on(READ_AS, "megatron_to_hf_mode", mode, why)],
    )
