"""Declare flags, and check their values.

The rules of a section report to an ``Errors``, which collects every broken rule, so that a user corrects a command
line in one go. The functions at the end of this file are the same checks for a single value: they raise at once.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin

from miles.base import strict_json
from miles.base.secrets import public
from miles.base.text import InputError, one_line

LARGEST = 2**63 - 1  # what an integer of torch, numpy and Arrow holds
LARGEST_COUNT = 2**31 - 1  # of anything but seeds; what 32 bits hold, and the product of two fits in LARGEST
LARGEST_FLOAT = 3.4e38  # what a float of 32 bits holds
LARGEST_SIZE = 1_000_000_000  # of a size in MB or GB; in bytes it fits in LARGEST
LONGEST_VALUE = 200  # characters of a value in a message
LONGEST_WAIT = 1_000_000  # seconds of a time limit; the system waits for 2**31 milliseconds at most
LONGEST_MESSAGE = 1500
LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes of a path, and of each name in it, on Linux
# The same, if a run writes files in it, or under a longer name first.
LONGEST_TO_WRITE, LONGEST_NAME_TO_WRITE = 3500, 240
LONGEST_SHOWN_PATH = 60  # characters of a path that is refused for its length
PATH_METAVARS = ("DIR", "FILE", "FILE.html", "FOLDER", "OUT", "PATH", "RUN")  # of arguments that name a file or folder
_HUB_NAME = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters, and what else ends a line
_BREAKS_IN_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")


class FlagError(InputError):
    """Report what is wrong with a command line.

    Attributes:
        messages: One message per broken rule: ``--flag value: rule; what to do``.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """Declare a field of a section as a flag, with a default and a help text.

    Modules that declare flags must not use ``from __future__ import annotations``: argparse-dataclass reads the types
    as objects.

    Args:
        default: The value when the flag is not given.
        help: The text in ``--help`` and on the docs' page of flags.
        **metadata: ``args``, ``choices``, ``nargs``, ``metavar`` or ``type``, as argparse-dataclass takes them; and
            ``has_lines`` for a text that may have line breaks and tabs, ``is_written`` for a path that the run writes.
    """
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def flag_name(field: str) -> str:
    """Spell a field as its flag: ``eps_clip`` is ``--eps-clip``."""
    return "--" + field.replace("_", "-")


def flag_choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the values that a flag accepts, or nothing if it is not limited to some."""
    return get_args(field.type) if get_origin(field.type) is Literal else tuple(field.metadata.get("choices") or ())


@cache
def _limited(section: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the fields of a class of flags that are limited to some values, with these."""
    return tuple((field.name, accepted) for field in fields(section) if (accepted := flag_choices(field)))


def count(number: int, noun: str) -> str:
    """Spell a count: ``1 step``, ``2 steps``, ``2 trajectories``."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun}" if number == 1 else f"{number} {plural}"


def changed(section: Any, names: Iterable[str]) -> list[str]:
    """Return those of the named fields whose values differ from their defaults: the ones that the user has set."""
    defaults = type(section)  # a dataclass keeps them as attributes of the class
    return [name for name in names if getattr(section, name) != getattr(defaults, name)]


class Errors:
    """Collect the broken rules of a command line."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        """Add an error. The message begins with the flag: ``--flag value: rule; what to do``."""
        message = one_line(message, LONGEST_MESSAGE)
        if message not in self.messages:
            self.messages.append(message)

    def add_unless_refused(self, message: str) -> None:
        """Add an error, unless its flag has one: a value that cannot be read is not missing as well.

        Nor is a flag that another message suggests instead of one that does not exist.
        """
        required, is_missing, _ = message.partition(" is required:")
        suggested = [f"did you mean {name}?" for name in required.split(" or ")] if is_missing else []
        if any(words in known for words in suggested for known in self.messages):
            return
        flag = re.match(r"--[\w-]+", message)
        if flag is None or not any(re.match(rf"{flag[0]}(?![\w-])", known) for known in self.messages):
            self.add(message)

    def raise_if_any(self) -> None:
        """Raise ``FlagError`` with all messages, if there are any."""
        if self.messages:
            raise FlagError(*self.messages)

    def none_about(self, *names: str) -> bool:
        """Return whether none of the named fields has an error, so that rules that build on them can be checked."""
        refused = {found[0] for message in self.messages if (found := re.match(r"--[\w-]+", message))}
        return not refused & {flag_name(name) for name in names}

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Add the error of a block that raises ``ValueError`` at its first broken rule, and continue after it."""
        try:
            yield
        except FlagError as error:
            for message in error.messages:
                self.add(message)
        except ValueError as error:
            self.add(str(error))

    def refuse(self, field: str, value: Any, rule: str, what_to_do: str) -> None:
        """Add ``--flag value: rule; what to do``. A switch, or a value of None, is shown without its value.

        Secrets in the value are not shown.
        """
        value = public(field, value)
        words = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        shown = "" if value is None or value is True else f" {one_line(words, LONGEST_VALUE)}"
        self.add(f"{flag_name(field)}{shown}: {rule}; {what_to_do}")

    def refuse_ignored(self, section: Any, names: Iterable[str], why: str, what_to_do: str) -> None:
        """Refuse the named fields if they are set, because they would have no effect."""
        for name in changed(section, names):
            self.refuse(
                name, getattr(section, name), f"would be ignored {why}", f"{what_to_do}, or drop {flag_name(name)}"
            )

    def require(self, field: str, value: Any, meaning: str) -> None:
        """Refuse a missing flag."""
        if value is None:
            name = flag_name(field)
            self.add(f"{name} is required: {meaning}; add {name} to the command")

    def choices(self, section: Any) -> None:
        """Check every field of ``section`` that is limited to some values."""
        kind: Any = type(section)  # mypy takes no class for hashable
        for name, accepted in _limited(kind):
            value = getattr(section, name)
            if value is not None and value not in accepted:
                self.refuse(name, value, "no such choice", f"give one of {', '.join(accepted)}")

    def texts(self, section: Any) -> None:
        """Check that no text of ``section`` is empty or has characters that no file and no message can hold."""
        for field in fields(section):
            value = getattr(section, field.name)
            for word in value if isinstance(value, tuple) else (value,):
                if not isinstance(word, str) or value == field.default:
                    continue
                blank_is_empty = field.name != "rollout_stop"  # a response may well end at a line break
                if not (word.strip() if blank_is_empty else word):
                    self.add(f"{flag_name(field.name)}: the value is empty; give one, or drop {flag_name(field.name)}")
                elif (rule := fault_of_text(word, bool(field.metadata.get("has_lines")))) is not None:
                    self.refuse(field.name, word, rule, "correct the value")
                elif field.metadata.get("metavar") in PATH_METAVARS:
                    rule = fault_of_path(word, bool(field.metadata.get("is_written")))
                    if rule is not None:
                        self.refuse(field.name, one_line(word, LONGEST_SHOWN_PATH), rule, "give a shorter one")

    def sizes(self, section: Any) -> None:
        """Check that no number of ``section`` is larger than anything of its kind: a count, a time limit, a size."""
        for field in fields(section):
            value = getattr(section, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    continue
                if (rule := fault_of_size(field.name, number)) is not None:
                    self.refuse(field.name, number, rule, "give a number nearer to 0")

    def _unrefused(self, section: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Yield name and value of the fields that are set and have no error: one value is out of range once."""
        for name in names:
            value = getattr(section, name)
            if value is not None and self.none_about(name):
                yield name, value

    def finite(self, section: Any, *names: str) -> None:
        """Check that each named field is None or a finite number."""
        for name, value in self._unrefused(section, names):
            if not math.isfinite(value):
                self.refuse(name, value, "must be a finite number", "give a number")

    def at_least(self, section: Any, bound: float, *names: str) -> None:
        """Check that each named field is None, or finite and at least ``bound``."""
        for name, value in self._unrefused(section, names):
            if not (math.isfinite(value) and value >= bound):
                self.refuse(name, value, f"must be a finite number of at least {bound:g}", f"give {bound:g} or more")

    def above(self, section: Any, bound: float, *names: str) -> None:
        """Check that each named field is None, or finite and above ``bound``."""
        for name, value in self._unrefused(section, names):
            if not (math.isfinite(value) and value > bound):
                self.refuse(name, value, f"must be a finite number above {bound:g}", f"give a number above {bound:g}")

    def within(self, section: Any, low: float, high: float, *names: str, open_high: bool = False) -> None:
        """Check that each named field is None or in [low, high]; in [low, high) with ``open_high``."""
        for name, value in self._unrefused(section, names):
            if not (low <= value < high or (value == high and not open_high)):
                end = ")" if open_high else "]"
                self.refuse(
                    name, value, f"must be in [{low:g}, {high:g}{end}", f"give a number from {low:g} to {high:g}"
                )

    def json_object(self, field: str, text: str | None) -> dict[str, Any]:
        """Return the object that a JSON flag holds; an empty one if the flag is not given or holds none."""
        if text is None:
            return {}
        try:
            value = strict_json.loads(text)
        except strict_json.StrictJsonError as error:
            what_to_do = 'write an object in single quotes, \'{"key": "value"}\''
            self.refuse(field, text, str(error), what_to_do)
            return {}
        if not isinstance(value, dict):
            self.refuse(field, text, "must be a JSON object", 'write \'{"key": "value"}\' in single quotes')
            return {}
        return value

    def existing_file(self, field: str, path: str) -> bool:
        """Check that ``path`` is a file; return whether it is."""
        if os.path.isfile(path):  # unlike Path.is_file, false for a name that is too long
            return True
        if os.path.exists(path):
            self.refuse(field, path, "not a regular file", "give one: a run that resumes reads it again")
        else:
            what_to_do = "check the path; it is relative to the folder in which the run starts"
            self.refuse(field, path, "no such file", what_to_do)
        return False

    def folder_to_write(self, field: str, path: str | None) -> None:
        """Check that ``path`` is no file, nor below one. It may be missing."""
        if path is None or "://" in path or os.path.isdir(path):
            return
        if os.path.isfile(path):
            self.refuse(field, path, "is a file", "give a folder")
        elif (file := _file_above(path)) is not None:
            self.refuse(field, path, f"is below {one_line(file, LONGEST_VALUE)}, which is a file", "give a folder")

    def existing_folder(self, field: str, path: str | None) -> None:
        """Check that ``path`` is a folder, unless it can be a name on a hub: one word, or two with a slash between."""
        if path is not None and "://" in path:
            self.refuse(field, path, "is a URL", "copy the files to a folder of this machine, and give that")
            return
        if path is None or os.path.isdir(path):
            return
        if os.path.isfile(path):
            self.refuse(field, path, "is a file", "give the folder that it is in")
        elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
            self.refuse(field, path, "no such folder", "check the path, or give a Hugging Face name")
        elif not is_hub_name(path):
            rule = "no such folder, and no model of the Hugging Face hub has such a name"
            self.refuse(field, path, rule, "check the path, or correct the name")


@contextmanager
def collect_errors() -> Iterator[Errors]:
    """Give a block an ``Errors``, and raise ``FlagError`` with all that was collected when the block ends."""
    errors = Errors()
    yield errors
    errors.raise_if_any()


def fault_of_text(word: str, has_lines: bool) -> str | None:
    """Return the rule that a text breaks: it has control characters, or line breaks though ``has_lines`` is false."""
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:  # an argument that is not UTF-8 has half surrogates
        return "has bytes that are not UTF-8"
    if (_BREAKS_IN_TEXT if has_lines else _BREAKS).search(word) is None:
        return None
    return "has a control character" if has_lines else "has a line break or another control character"


def fault_of_path(path: str, is_written: bool = False) -> str | None:
    """Return the rule that a path breaks which is too long for any file system here, or for what a run writes there."""
    longest, longest_name = (LONGEST_TO_WRITE, LONGEST_NAME_TO_WRITE) if is_written else (LONGEST_PATH, LONGEST_NAME)
    of_a_run = " that a run writes" if is_written else ""
    if (length := len(path.encode())) > longest:
        return f"has {length} bytes, and a path{of_a_run} has at most {longest}"
    length = max(len(name.encode()) for name in path.split("/"))
    if length > longest_name and "://" not in path:
        return f"has a name of {length} bytes, and a name in a path{of_a_run} has at most {longest_name}"
    return None


def is_hub_name(text: str) -> bool:
    """Return whether a model on the Hugging Face hub can be called so (huggingface_hub, ``validate_repo_id``)."""
    return _HUB_NAME.fullmatch(text) is not None and not (".." in text or "--" in text or text.endswith(".git"))


def _file_above(path: str) -> str | None:
    """Return the file among the folders that ``path`` would be in; None if there is none."""
    while (parent := os.path.dirname(path)) not in ("", path):
        path = parent
        if os.path.exists(path):
            return None if os.path.isdir(path) else path
    return None


def fault_of_size(field: str, number: float) -> str | None:
    """Return the rule that a number breaks which is larger than anything of its kind; inf has rules of its own."""
    bound = _bound(field, number)
    if not bound < abs(number) < math.inf:
        return None
    return f"must be at least -{bound}" if number < 0 else f"must be at most {bound}"


def _bound(field: str, number: float) -> float:
    """Return how large a number of this field can be at most."""
    if field.endswith("_minutes"):
        return LONGEST_WAIT // 60
    if field.endswith(("timeout", "_seconds", "check_interval")):
        return LONGEST_WAIT
    if field.endswith(("_memory", "_max_mb")):
        return LARGEST_SIZE
    if field.endswith("seed"):
        return LARGEST
    return LARGEST_COUNT if isinstance(number, int) else LARGEST_FLOAT


class _FirstError(Errors):
    def add(self, message: str) -> None:
        raise FlagError(one_line(message, LONGEST_MESSAGE))


_first_error = _FirstError()
refuse = _first_error.refuse
refuse_ignored = _first_error.refuse_ignored
require = _first_error.require
finite = _first_error.finite
at_least = _first_error.at_least
above = _first_error.above
within = _first_error.within
json_object = _first_error.json_object
