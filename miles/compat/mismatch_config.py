"""Read the settings of slime's and miles' function of importance weights (``mis.yaml``) as the flags that do its work.

Their scripts give ``--custom-tis-function-path examples.….mis.compute_mis_weights_with_cp`` and what it reads, in
``--custom-config-path`` or as flags. The formulas are those of docs/off-policy.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.base.flags import Errors, flag_name
from miles.compat.functions import missing_function
from miles.compat.line import Line
from miles.config.notes import NO_EFFECT, written
from miles.config.spelling import group_words

FLAG = "--custom-tis-function-path"
FUNCTIONS = ("compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp")
_OF_WEIGHTS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize")
_OF_REJECTION = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
_MODES = {"truncate": "truncate", "clip": "truncate", "mask": "icepop"}  # theirs -> ours


def read_mismatch_config(line: Line, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop their function if the command names it, and it or the file has the settings.

    Args:
        line: The command.
        values: The settings of ``--custom-config-path``.

    Returns:
        The settings with our names, for those of the file.
    """
    path = line.value(FLAG)
    if path is None or path.replace(":", ".").rpartition(".")[2] not in FUNCTIONS:
        return dict(values)
    in_words = _in_words(line.words)
    if missing_function(FLAG, path) is None or not (in_words.keys() | values.keys()) & {*_OF_WEIGHTS}:
        return dict(values)
    values = in_words | dict(values)  # the file takes precedence there
    line.drop(*map(flag_name, in_words))

    def is_on(name: str) -> bool:
        return bool(values.get(name, flag_name(name) in line))

    others = {name: value for name, value in values.items() if name not in (*_OF_WEIGHTS, *_OF_REJECTION)}
    if not is_on("use_tis"):
        line.note(NO_EFFECT, FLAG, "its settings have use_tis: false, so it weighs and rejects nothing")
        line.drop(FLAG)
        return others | {"use_rs": False}
    found = _flags_of(values, is_on("use_rs"), line.errors)
    said = " ".join(written(flag_name(name), value) for name, value in found.items() if value is not False)
    if found["tis_batch_normalize"]:
        said += ", where the mean is over the whole step instead of a rank's micro-batch"
    line.read_as(FLAG, f"{said}: the same weights")
    return others | found


def _in_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings of their function among the words; newer releases have them as flags."""
    names = {flag_name(name): name for name in (*_OF_WEIGHTS, *_OF_REJECTION)}
    groups = [(names[flag], given) for flag, given in group_words(words) if flag in names]
    return {name: given[-1] if given else True for name, given in groups}


def _flags_of(values: Mapping[str, Any], rejects: bool, errors: Errors) -> dict[str, Any]:
    """Return the flags by name. A bound that is not given follows from the others, as there."""
    mode = values.get("tis_mode", "truncate")
    upper = _number(values, "tis_upper_bound", 2.0, errors)
    lower = _number(values, "tis_lower_bound", 1.0 / upper, errors)
    if mode not in _MODES:
        errors.add(f"--tis-mode {mode}: no such mode of this function; give one of {', '.join(_MODES)}")
    if mode == "mask" and values.get("tis_batch_normalize"):
        errors.add(
            "--tis-batch-normalize: with --tis-mode mask of this function the mean counts the ratios that are "
            "dropped, and here it does not; drop it, or give --tis-mode clip"
        )
    found: dict[str, Any] = {
        "use_tis": True,
        "tis_mode": _MODES.get(mode, "truncate"),
        "tis_level": values.get("tis_level", "token"),
        "tis_clip": upper,
        "tis_clip_low": 0.0 if mode == "truncate" else lower,
        "tis_batch_normalize": bool(values.get("tis_batch_normalize")),
        "use_rs": rejects,
    }
    if rejects:
        found |= {
            "rs_level": values.get("rs_level", "token"),
            "rs_lower_bound": _number(values, "rs_lower_bound", lower, errors),
            "rs_upper_bound": _number(values, "rs_upper_bound", upper, errors),
        }
        if values.get("rs_veto_threshold") is not None:
            found["rs_veto_threshold"] = _number(values, "rs_veto_threshold", 1e-4, errors)
    return found


def _number(values: Mapping[str, Any], name: str, default: float, errors: Errors) -> float:
    """Return the number of that name, or the default if there is none. YAML reads ``1e-4`` as a text."""
    value = values.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < float("inf"):
        errors.add(f"{flag_name(name)} {value}: must be a finite number above 0; correct it")
        return default
    return number
