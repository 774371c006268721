"""The settings of a file, by name, each with its line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from miles.base.input_error import InputError
from miles.base.one_line import one_line
from miles.base.secret_values import public

LONGEST_SHOWN = 120


@dataclass(frozen=True)
class Expression:
    """Hold a value that is computed when the file is run, and so is not known: a variable, a call, an interpolation."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Setting:
    """Hold one setting: its name with dots between the levels, its value and its line in the file."""

    key: str
    value: Any
    line: int | None

    @property
    def shown(self) -> str:
        """The setting as the report shows it, without credentials."""
        return f"{self.key} = {one_line(str(public(self.key, self.value)), LONGEST_SHOWN)}"


@dataclass(frozen=True)
class Document:
    """Hold what was read from a file.

    Attributes:
        path: The file, as it was given.
        kind: ``json``, ``yaml``, ``toml``, ``python`` or ``shell``.
        settings: The settings in the order of the file. The last one of a name counts.
        words: The command of a shell script, without its variables; empty for other files.
        elsewhere: The words of the command that expand to flags set elsewhere, each with a sentence about it.
    """

    path: str
    kind: str
    settings: dict[str, Setting] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    elsewhere: dict[str, Setting] = field(default_factory=dict)

    def fail(self, line: int | None, fault: str) -> NoReturn:
        """Raise ``InputError`` with file and line."""
        fail(self.path, line, fault)


def fail(path: str, line: int | None, fault: str) -> NoReturn:
    """Raise ``InputError``: one sentence that starts with the file and the line."""
    place = path if line is None else f"{path}, line {line}"
    raise InputError(f"{one_line(place, 300)}: {one_line(fault, 600)}")


def by_key(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the settings by name. The last one of a name counts, and keeps the place of the first."""
    return {setting.key: setting for setting in settings}


def flatten(value: Any, line: dict[str, int], prefix: str = "") -> list[Setting]:
    """Return the leaves of nested objects, with dots between the levels. Lists are leaves."""
    found: list[Setting] = []
    for name, part in value.items():
        key = f"{prefix}{name}"
        if isinstance(part, dict) and part:
            found += flatten(part, line, f"{key}.")
        else:
            found.append(Setting(key, part, line.get(key)))
    return found
