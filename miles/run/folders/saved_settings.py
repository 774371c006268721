"""The settings in a checkpoint: say what a run that resumes has changed, and refuse what cannot continue.

A checkpoint has the settings of the sections that decide what is learned, without secrets. Those of the others, such as
``--output-dir`` and ``--worker-timeout``, may change without a note.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from miles.base.flags import LONGEST_VALUE, flag_name
from miles.base.one_line import one_line
from miles.base.secret_values import public
from miles.config.checkpoint import CheckpointArguments
from miles.config.files.tokenizer_file import fault_of_tokens
from miles.config.settings import Settings
from miles.tasks.data.stream import check_order
from miles.training import checkpoint_folder
from miles.types.data_position import positions_in_sets

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
# Settings of these sections that do not decide what is learned: how names end, and whole names.
_LIMITS = ("_timeout", "_concurrency", "_retries", "_memory", "_cache", "_processes", "_workers")
_OUTPUTS = ("save_debug_rollout_data", "log_passrate", "get_mismatch_metrics", "loss_canary")
_SHOWN = 8  # settings in a note


def settings_to_save(settings: Settings) -> dict[str, dict[str, Any]]:
    """Return the settings as a checkpoint has them: section to field to value, in plain JSON."""
    found = {}
    for name in _SECTIONS:
        section = getattr(settings, name)
        values = dict(section) if isinstance(section, tuple) else dataclasses.asdict(section)
        found[name] = {
            field: value for field, value in values.items() if not field.endswith(_LIMITS) and field not in _OUTPUTS
        }
    plain: dict[str, dict[str, Any]] = json.loads(json.dumps(public("settings", found), default=str))
    return plain


def check_settings(checkpoint: CheckpointArguments, settings: Settings) -> list[str]:
    """Compare the settings with those of the checkpoint in ``--load``, if the run continues that.

    Returns:
        A note with the settings that differ, if some do.

    Raises:
        ValueError: Another training backend wrote the checkpoint, its prompts were in another order, or its model had
            another tokenizer.
    """
    folder = None if checkpoint.load is None else checkpoint_folder.at(checkpoint.local(checkpoint.load))
    if folder is None:
        return []
    checkpoint_folder.read_run_state(folder, settings.training.train_backend, f"--load {checkpoint.load}")
    if checkpoint.finetune:
        return []
    state = checkpoint_folder.read_launcher_state(folder)
    order = {"shuffle": settings.data.rollout_shuffle, "seed": settings.data.rollout_seed}
    for position in positions_in_sets(state["prompts"]):
        check_order(position, order)
    before, now = state.get(KEY), settings_to_save(settings)
    if not isinstance(before, dict):  # an earlier version
        return []
    _check_tokenizer(checkpoint, before.get("model"), settings)
    changed = [_changed(name, values) for name, values in _differences(before, now)]
    if not changed:
        return []
    more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    return [
        f"--load {checkpoint.load}: {folder.name} was saved with other settings, and this run continues with its own: "
        f"{'; '.join(changed[:_SHOWN])}{more}"
    ]


def _check_tokenizer(checkpoint: CheckpointArguments, model: object, settings: Settings) -> None:
    before, now = (model.get("hf_checkpoint") if isinstance(model, dict) else None), settings.model.hf_checkpoint
    if not isinstance(before, str) or now is None or before == now:
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
