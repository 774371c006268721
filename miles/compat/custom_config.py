"""Read ``--custom-config-path``: a YAML file of settings that takes precedence over the command."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from miles.base.flags import LONGEST_VALUE, flag_name
from miles.base.text import one_line

FLAG = "--custom-config-path"
LARGEST = 1_000_000  # characters of the file


def read_custom_config(path: str) -> dict[str, Any]:
    """Return the keys and values of the file.

    Raises:
        ValueError: It cannot be read, or is not an object of YAML; the message names the flag.
    """
    import yaml  # few commands have such a file

    shown = f"{FLAG} {one_line(path, LONGEST_VALUE)}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{shown}: cannot be read ({error.strerror}); check the path") from error
    except ValueError as error:
        raise ValueError(f"{shown}: is not UTF-8 text; check the path") from error
    if len(text) > LARGEST:
        raise ValueError(f"{shown}: has more than {LARGEST} characters; check the path")
    try:
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        reason = one_line(str(error.problem), LONGEST_VALUE)
        raise ValueError(f"{shown}: is not YAML ({reason}{line}); correct it there") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = one_line(str(error), LONGEST_VALUE)
        raise ValueError(f"{shown}: is not YAML ({reason}); correct it there") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{shown}: holds no object; write one setting per line, as name: value")
    return values


def words_of(values: Mapping[str, Any], flags: Collection[str]) -> list[str]:
    """Return the values whose names are ``flags`` as words of a command. One of ``left_out`` gives none."""
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


def left_out(values: Mapping[str, Any]) -> set[str]:
    """Return the flags that the file leaves out of the command, by a value of false or null."""
    return {flag_name(name) for name, value in values.items() if _leaves_out(value)}


def _leaves_out(value: Any) -> bool:
    return value is None or value is False


def names_without_flag(values: Mapping[str, Any], flags: Collection[str]) -> list[str]:
    """Return the names that no flag has: they are for functions of the user's."""
    return [name for name in values if flag_name(name) not in flags]
