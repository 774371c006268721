"""Read ``--custom-config-path``: a YAML file of settings that takes precedence over the command.

Among them can be the settings of slime's and miles' function of importance weights (``mis.yaml``), which scripts name
as ``--custom-tis-function-path examples.….mis.compute_mis_weights_with_cp``. They become the flags that do its work;
the formulas are in docs/off-policy.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from miles.base.flags import Errors, flag_name
from miles.compat.functions import missing_function
from miles.compat.line import Line
from miles.config.flags_view import CUSTOM_CONFIG, read_custom_config
from miles.config.notes import NO_EFFECT, written
from miles.config.spelling import group_words

MISMATCH_FLAG = "--custom-tis-function-path"
MISMATCH_FUNCTIONS = ("compute_mis_weights", "compute_mis_weights_with_cp", "compute_mis_weights_fsdp")
_OF_WEIGHTS = ("tis_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "tis_batch_normalize")
_OF_REJECTION = ("rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold")
_MODES = {"truncate": "truncate", "clip": "truncate", "mask": "icepop"}  # theirs -> ours


def read_settings_of_file(line: Line, known: Callable[[Sequence[str]], Collection[str]]) -> list[str]:
    """Add the settings of the file to the command, if it names one.

    Args:
        line: The command.
        known: Returns the flags that exist, if some of these words are flags of Megatron also its own.

    Returns:
        The names in the file that are no flags: they are for functions of the user's.
    """
    path = line.value(CUSTOM_CONFIG)
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = read_custom_config(path)
        except ValueError as error:
            line.errors.add(str(error))
            return []
    values = read_mismatch_config(line, values)
    if not values:
        return []
    flags = known([flag_name(name) for name in values])
    line.drop(*(flag_name(name) for name, value in values.items() if _leaves_out(value)))
    line.words += words_of(values, flags)
    return [name for name in values if flag_name(name) not in flags]


def words_of(values: Mapping[str, Any], flags: Collection[str]) -> list[str]:
    """Return the values whose names are ``flags`` as words of a command; false and null give none."""
    words = []
    for name, value in values.items():
        flag = flag_name(name)
        if flag not in flags or _leaves_out(value):
            continue
        words.append(flag)
        if value is True:
            continue
        many = value if isinstance(value, list) else [value]
        words += [json.dumps(part) if isinstance(part, dict | list) else str(part) for part in many]
    return words


def _leaves_out(value: Any) -> bool:
    return value is None or value is False


def read_mismatch_config(line: Line, values: Mapping[str, Any]) -> dict[str, Any]:
    """Drop their function if the command names it, and it or the file has the settings.

    Args:
        line: The command.
        values: The settings of ``--custom-config-path``.

    Returns:
        The settings with our names, for the settings of the file.
    """
    path = line.value(MISMATCH_FLAG)
    if path is None or path.replace(":", ".").rpartition(".")[2] not in MISMATCH_FUNCTIONS:
        return dict(values)
    in_words = _in_words(line.words)
    if missing_function(MISMATCH_FLAG, path) is None or not (in_words.keys() | values.keys()) & {*_OF_WEIGHTS}:
        return dict(values)
    values = in_words | dict(values)  # the file takes precedence there
    line.drop(*map(flag_name, in_words))

    def is_on(name: str) -> bool:
        return bool(values.get(name, flag_name(name) in line))

    others = {name: value for name, value in values.items() if name not in (*_OF_WEIGHTS, *_OF_REJECTION)}
    if not is_on("use_tis"):
        line.note(NO_EFFECT, MISMATCH_FLAG, "its settings have use_tis: false, so it weighs and rejects nothing")
        line.drop(MISMATCH_FLAG)
        return others | {"use_rs": False}
    found = _flags_of(values, is_on("use_rs"), line.errors)
    said = " ".join(written(flag_name(name), value) for name, value in found.items() if value is not False)
    if found["tis_batch_normalize"]:
        said += ", where the mean is over the whole step instead of a rank's micro-batch"
    line.read_as(MISMATCH_FLAG, f"{said}: the same weights")
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
