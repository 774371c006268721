"""The result of a translation: our flags, and what became of every setting."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from miles.base.secrets import public
from miles.base.text import InputError, one_line
from miles.objective.estimators import ESTIMATORS
from miles.tasks.data.settings import HUB_NAME, HUGGING_FACE

# The settings of a file, by name, each with its line.


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


_FILES_OF_PROMPTS = (".jsonl", ".json", ".parquet", ".csv", ".arrow")


@dataclass(frozen=True)
class Entry:
    """Hold one line of the report: a setting, the flags that it became, and what a reader must know."""

    shown: str
    line: int | None
    words: tuple[str, ...] = ()
    why: str = ""


class Translation:
    """Collect what becomes of the settings of one file.

    A launcher takes settings by name. The rest is listed as unknown, so that nothing is dropped silently.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.carried: list[Entry] = []
        self.differing: list[Entry] = []
        self.missing: list[Entry] = []
        self._taken: set[str] = set()

    # Reading ---------------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the file sets ``key`` to something but null."""
        setting = self.document.settings.get(key)
        return setting is not None and setting.value is not None

    def raw(self, key: str, default: Any = None) -> Any:
        """Take the value of ``key``; the default if it is absent, null or an expression."""
        self._taken.add(key)
        value = self.document.settings[key].value if self.has(key) else default
        return default if isinstance(value, Expression) else value

    def text(self, key: str, default: str = "") -> str:
        """Take a text."""
        return str(self.raw(key, default))

    def switch(self, key: str, default: bool = False) -> bool:
        """Take a truth value."""
        value = self.raw(key, default)
        word = str(value).lower()
        if word not in ("true", "false", "1", "0"):
            self.fail(key, "must be true or false; correct the value")
        return word in ("true", "1")

    def number(self, key: str, default: float) -> float:
        """Take a finite number."""
        value = self.raw(key, default)
        try:
            number = float(value)
        except (TypeError, ValueError):
            self.fail(key, "must be a number; correct the value")
        if isinstance(value, bool) or not math.isfinite(number):
            self.fail(key, "must be a finite number; correct the value")
        return number

    def count(self, key: str, default: int) -> int:
        """Take a whole number of 1 or more."""
        number = self.number(key, default)
        if number != int(number) or number < 1:
            self.fail(key, "must be a whole number of 1 or more; correct the value")
        return int(number)

    def pair(self, key: str, default: list[Any] | None = None) -> list[Any] | None:
        """Take a list of two numbers; the default if it is absent, null or an expression."""
        value = self.raw(key, default)
        if value is not None and (not isinstance(value, list) or len(value) != 2):
            self.fail(key, "must be a list of two numbers; correct it")
        return value

    def fail(self, key: str, rule: str) -> NoReturn:
        """Raise ``InputError`` about the value of ``key``."""
        setting = self.document.settings[key]
        self.document.fail(setting.line, f"{setting.shown}: {rule}")

    # Writing ---------------------------------------------------------------------------------------------------------

    def carry(self, key: str, *words: object) -> None:
        """Record that ``key`` means what ``words`` mean. A key with an expression becomes no words."""
        if not self._is_computed(key):
            self.carried.append(self._entry(key, words, ""))

    def differ(self, key: str, why: str, *words: object) -> None:
        """Record that ``key`` became ``words``, or none, and what differs; not with an expression."""
        if not self._is_computed(key):
            self.differing.append(self._entry(key, words, why))

    def miss(self, key: str, why: str) -> None:
        """Record that ``key`` has no counterpart."""
        self.missing.append(self._entry(key, (), why))

    def miss_given(self, keys: Iterable[str], why: str) -> None:
        """Record that those of ``keys`` that are set have no counterpart."""
        for key in filter(self.has, keys):
            self.miss(key, why)

    def take(self, keys: Iterable[str]) -> None:
        """Mark settings as read."""
        self._taken.update(keys)

    def _is_computed(self, key: str) -> bool:
        self._taken.add(key)
        setting = self.document.settings.get(key)
        return setting is not None and isinstance(setting.value, Expression)

    def _entry(self, key: str, words: tuple[object, ...], why: str) -> Entry:
        self._taken.add(key)
        setting = self.document.settings.get(key)
        if setting is None:
            return Entry(f"{key} (its default)", None, tuple(map(_word, words)), why)
        return Entry(setting.shown, setting.line, tuple(map(_word, words)), why)

    # The result ------------------------------------------------------------------------------------------------------

    @property
    def unknown(self) -> list[Setting]:
        """The settings that the launcher's table does not have."""
        return [setting for key, setting in self.document.settings.items() if key not in self._taken]

    @property
    def read_along(self) -> list[Setting]:
        """The settings that were read and have no line of their own: they are a part of another's flags."""
        listed = {entry.shown for entry in (*self.carried, *self.differing, *self.missing)}
        return [
            setting
            for setting in self.document.settings.values()
            if setting.key in self._taken and setting.shown not in listed and not isinstance(setting.value, Expression)
        ]

    def expressions(self) -> list[Setting]:
        """Return the settings whose values are computed when the file is run."""
        return [s for s in self.document.settings.values() if isinstance(s.value, Expression) and s.key in self._taken]

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """Our flags in the order of the report, each with its values. A flag that is given again has the last value."""
        groups = dict[str, tuple[str, ...]]()
        for entry in (*self.carried, *self.differing):
            for group in _flag_groups(entry.words):
                groups[group[0]] = group
        return list(groups.values())

    @property
    def words(self) -> list[str]:
        """Our flags as the words of a command line."""
        return [word for group in self.groups for word in group]


def _flag_groups(words: tuple[str, ...]) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for word in words:
        if word.startswith("--") or not groups:
            groups.append((word,))
        else:
            groups[-1] += (word,)
    return groups


def _word(value: object) -> str:
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)
    return one_line(str(value), 4000)


@dataclass(frozen=True)
class Row:
    """Describe a setting whose value is passed on as it is.

    Attributes:
        flag: Our flag; empty if there is none.
        why: What differs in meaning or, without a flag, why there is no counterpart.
        kind: ``value``, ``number``, ``prompts`` for a file or a name of the Hub, or ``switch``, which becomes a flag
            without value if it is true.
        default: The value there, if it differs from ours: it is written even if the file does not have it.
        neutral: Values that ask for nothing, here and there.
        needs: A flag of ours without which this one has no effect: it is written only beside it.
    """

    flag: str = ""
    why: str = ""
    kind: str = "value"
    default: Any = None
    neutral: tuple[Any, ...] = ()
    needs: str = ""


def apply(rows: Mapping[str, Row], translation: Translation) -> None:
    """Translate the settings of a table that the file has, or whose defaults differ."""
    for key, row in sorted(rows.items(), key=lambda item: bool(item[1].needs)):
        if not translation.has(key):
            translation.take([key])
            if row.default is not None:
                _write(translation, key, row, row.default)
            continue
        if isinstance(translation.document.settings[key].value, Expression):
            translation.take([key])
        elif row.needs and row.needs not in translation.words and translation.raw(key) not in row.neutral:
            translation.miss(key, f"{row.flag} needs {row.needs}: add both")
        elif row.kind == "prompts":
            _write_prompts(translation, key, row)
        elif row.kind == "switch":
            _write_switch(translation, key, row)
        else:
            _write(translation, key, row, translation.number(key, 0) if row.kind == "number" else translation.raw(key))


def _write_switch(translation: Translation, key: str, row: Row) -> None:
    is_on = translation.switch(key)
    if not row.flag and is_on not in row.neutral:
        translation.miss(key, row.why)
    elif row.why and is_on:
        translation.differ(key, row.why, *([row.flag] if row.flag else []))
    else:
        translation.carry(key, *([row.flag] if is_on and row.flag else []))


def _write_prompts(translation: Translation, key: str, row: Row) -> None:
    name = translation.text(key)
    beside = Path(translation.document.path).parent / name
    is_file = Path(name).suffix in _FILES_OF_PROMPTS or os.path.exists(name) or os.path.exists(beside)
    if HUB_NAME.fullmatch(name) and not is_file:
        translation.differ(key, row.why, row.flag, f"{HUGGING_FACE}{name}")
    else:
        translation.carry(key, row.flag, name)


def _write(translation: Translation, key: str, row: Row, value: Any) -> None:
    if value in row.neutral:
        translation.carry(key)
    elif not row.flag:
        translation.miss(key, row.why)
    else:
        words = [row.flag, *(value if isinstance(value, list) else [value])]
        if row.why:
            translation.differ(key, row.why, *words)
        else:
            translation.carry(key, *words)


# Write an estimator with what it needs here, and a KL that is subtracted from rewards.


WHITENED = "advantages are whitened over the whole rollout there, over the tokens of a step here"


def write_estimator(translation: Translation, key: str, *words: str) -> None:
    """Record the estimator of ``key``, and that whitened advantages are whitened over other tokens."""
    if "--normalize-advantages" in words:
        translation.differ(key, WHITENED, *words)
    else:
        translation.carry(key, *words)


def write_kl_in_rewards(translation: Translation, key: str, coefficient: float) -> bool:
    """Record a KL that is subtracted from rewards there, in the loss if the estimator here does not read it.

    Returns:
        Whether it has a counterpart: it has none if the loss has a KL already.
    """
    words = translation.words
    name = words[words.index("--advantage-estimator") + 1] if "--advantage-estimator" in words else "grpo"
    if "kl_coef" in ESTIMATORS[name].reads:
        translation.carry(key, "--kl-coef", coefficient)
    elif "--use-kl-loss" in words:
        translation.miss(key, f"subtracted from rewards there, which {name} does not do here; the loss has a KL too")
        return False
    else:
        why = f"subtracted from rewards there, which {name} does not do here: it is a term of the loss"
        translation.differ(key, why, "--use-kl-loss", "--kl-loss-coef", coefficient)
    return True
