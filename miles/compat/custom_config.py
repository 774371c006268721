"""Read ``--custom-config-path``: a YAML file of settings that takes precedence over the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from miles.base.flags import flag_name
from miles.compat.line import Line
from miles.compat.mismatch_config import read_mismatch_config
from miles.config.flags_view import CUSTOM_CONFIG, read_custom_config


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
