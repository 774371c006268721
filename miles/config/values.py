"""Read values that scripts of related launchers write in another form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from miles.config.abilities import has_servers
from miles.config.notes import READ_AS, Note, note_on
from miles.config.rollout import names_iteration
from miles.config.settings import Settings
from miles.config.suggest import environment_strings, set_name


def normalize_values(settings: Settings) -> tuple[Settings, list[Note]]:
    """Read values that are written in another form: a set without a name, an environment of numbers."""
    notes = list[Note]()
    sets = settings.evaluation.eval_prompt_data
    if sets is not None and len(sets) == 1:
        named = (set_name(sets[0]), sets[0])
        notes.append(note_on(READ_AS, "eval_prompt_data", sets, " ".join(("--eval-prompt-data", *named))))
        settings = replace(settings, evaluation=replace(settings.evaluation, eval_prompt_data=named))
    saved = settings.rollout.save_debug_rollout_data
    if saved is not None and not names_iteration(saved) and settings.rollout.num_rollout != 1:
        path = Path(saved)
        by_iteration = str(path.with_name(f"{path.stem}_{{iteration}}{path.suffix}"))
        notes.append(
            note_on(READ_AS, "save_debug_rollout_data", saved, f"{by_iteration}: each iteration has a separate file")
        )
        settings = replace(settings, rollout=replace(settings.rollout, save_debug_rollout_data=by_iteration))
    if settings.rollout.debug_rollout_only and settings.cluster.colocate:
        size = settings.cluster.world_size if has_servers(settings) else None
        devices = f"--rollout-num-gpus {size}" if size else "the engine's own device"
        notes.append(note_on(READ_AS, "colocate", True, f"{devices}: no trainer shares it"))
        settings = replace(settings, cluster=replace(settings.cluster, colocate=False, rollout_num_gpus=size))
    strings = _strings(settings.cluster.train_env_vars)
    if strings is not None:
        why = "every value as a string, as environment variables are"
        notes.append(note_on(READ_AS, "train_env_vars", settings.cluster.train_env_vars, why))
        settings = replace(settings, cluster=replace(settings.cluster, train_env_vars=strings))
    return settings, notes


def _strings(text: str | None) -> str | None:
    try:
        return None if text is None else environment_strings(text)
    except ValueError:
        return None  # the validator reports it
