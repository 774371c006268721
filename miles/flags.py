"""How a section declares a flag, and the small checks that the rules are written in."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A field with a default and a help text; ``metadata`` may hold args, choices, nargs, metavar, type.

    Section modules must not use ``from __future__ import annotations``: argparse-dataclass reads the types as objects.
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def flag_name(field: str) -> str:
    """``eps_clip`` as it is typed: ``--eps-clip``."""
    return "--" + field.replace("_", "-")


def refuse(field: str, value: Any, rule: str, way_out: str) -> None:
    """Raise the error of one flag: ``--flag value: rule; way out``. A switch is shown without its value."""
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value
    shown = "" if value is None or value is True else f" {words}"
    raise ValueError(f"{flag_name(field)}{shown}: {rule}; {way_out}")


def require(field: str, value: Any, meaning: str) -> None:
    """Refuse a flag that is missing."""
    if value is None:
        raise ValueError(f"{flag_name(field)} is required: {meaning}; add {flag_name(field)} to the command")


def finite(section: Any, *names: str) -> None:
    """Each named field of ``section`` is None or a finite number."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not math.isfinite(value):
            refuse(name, value, "must be a finite number", "give a number")


def at_least(section: Any, bound: float, *names: str) -> None:
    """Each named field of ``section`` is None, or finite and at least ``bound``."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not (math.isfinite(value) and value >= bound):
            refuse(name, value, f"must be a finite number of at least {bound:g}", f"give {bound:g} or more")


def above(section: Any, bound: float, *names: str) -> None:
    """Each named field of ``section`` is None, or finite and above ``bound``."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not (math.isfinite(value) and value > bound):
            refuse(name, value, f"must be a finite number above {bound:g}", f"give a number above {bound:g}")


def within(section: Any, low: float, high: float, *names: str, open_high: bool = False) -> None:
    """Each named field is None or in [low, high]; in [low, high) with ``open_high``."""
    for name in names:
        value = getattr(section, name)
        if value is not None and not (low <= value < high or (value == high and not open_high)):
            end = ")" if open_high else "]"
            refuse(name, value, f"must lie in [{low:g}, {high:g}{end}", f"give a number from {low:g} to {high:g}")


def changed(section: Any, names: Iterable[str]) -> list[str]:
    """Those of the named fields that differ from their default: what the user has set."""
    default = {field.name: field.default for field in fields(section)}
    return [name for name in names if getattr(section, name) != default[name]]


def refuse_ignored(section: Any, names: Iterable[str], why: str, way_out: str) -> None:
    """Refuse flags that would have no effect: nothing that a user asks for is dropped in silence."""
    for name in changed(section, names):
        refuse(name, getattr(section, name), f"would be ignored {why}", f"{way_out}, or drop {flag_name(name)}")


def json_object(field: str, text: str | None) -> dict[str, Any]:
    """The object that a JSON flag holds; an empty one where the flag is not given."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{flag_name(field)} {text}: not JSON ({error}); write an object in single quotes, \'{{"key": "value"}}\''
        ) from None
    if not isinstance(value, dict):
        refuse(field, text, "must be a JSON object", 'write \'{"key": "value"}\' in single quotes')
    return value


def existing_file(field: str, path: str) -> None:
    """``path`` is a file."""
    if not Path(path).is_file():
        refuse(field, path, "no such file", "check the path; it is relative to the folder the run starts in")


def existing_folder(field: str, path: str | None) -> None:
    """``path`` is a folder, where it is written as a path (``/``, ``./`` or ``../`` first); a name may be on a hub."""
    if path is not None and path.startswith(("/", "./", "../")) and not Path(path).is_dir():
        refuse(field, path, "no such folder", "check the path, or give a Hugging Face name")
