"""Declare flags, and check their values.

The rules of a section report to an ``Errors``, which collects every broken rule, so that a user corrects a command
line in one go. The functions at the end of this file are the same checks for a single value: they raise at once.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from miles.base import strict_json
from miles.base.secrets import public
from miles.base.text import InputError, one_line

LARGEST = 2**63 - 1  # the largest integer of torch, numpy and Arrow
LARGEST_COUNT = 2**31 - 1  # of anything but seeds; what 32 bits hold, and the product of two fits in LARGEST
LARGEST_FLOAT = 3.4e38  # about the largest float of 32 bits
LARGEST_SIZE = 1_000_000_000  # of a size in MB or GB; in bytes it fits in LARGEST
LONGEST_VALUE = 200  # characters of a value in a message
LONGEST_WAIT = 1_000_000  # seconds of a time limit; the system waits for 2**31 milliseconds at most
LONGEST_MESSAGE = 1500
LONGEST_PATH, LONGEST_NAME = 4095, 255  # bytes of a path, and of each name in it, on Linux
# The same, if a run writes files in it, or under a longer name first.
LONGEST_TO_WRITE, LONGEST_NAME_TO_WRITE = 3500, 240
LONGEST_PATH_IN_ERROR = 60  # characters
T = TypeVar("T")
FileKind = Literal["file", "model", "folder", "new file", "new folder"]
# How a flag's value is called; "new" ones are written by the run.
FILE_KINDS: dict[FileKind, str] = {
    "file": "FILE",
    "model": "PATH",
    "folder": "DIR",
    "new file": "FILE",
    "new folder": "DIR",
}
PATH_METAVARS = ("DIR", "FILE", "FILE.html", "FOLDER", "OUT", "PATH", "RUN")  # of arguments that name a file or folder
_HUB_NAME = re.compile(r"(\b[\w.-]{1,96}\b/)?\b[\w.-]{1,96}\b", re.ASCII)
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # control characters, and what else ends a line
_BREAKS_IN_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")


class FlagError(InputError):
    """Report the errors of a command line.

    Attributes:
        messages: One message per broken rule: ``--flag value: rule; what to do``.
    """

    def __init__(self, *messages: str) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages


def flag(
    default: Any,
    help: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    within: str | None = None,
    needs: str = "",
    file: FileKind | None = None,
    **metadata: Any,
) -> Any:
    """Declare a field of a section as a flag: its default, range and condition, and its text in help and docs.

    Modules that declare flags must not use ``from __future__ import annotations``: argparse-dataclass reads the types
    as objects.

    Args:
        default: The value when the flag is not given.
        help: The text in ``--help`` and on the docs' page of flags.
        at_least: The smallest value.
        above: A bound that the value is larger than.
        within: The interval of the value, such as ``(0, 1]``.
        needs: Without which other flags it has no effect (config/needs.py): ``--save``, ``no --colocate``,
            ``--kl-coef or --use-kl-loss``, ``--opd-type server``, or a condition by name such as ``a critic``;
            several are separated by commas.
        file: The kind of path in the value: a file or a model that is there, or a file or folder that may be.
        **metadata: ``args``, ``choices``, ``nargs``, ``metavar`` or ``type``, as argparse-dataclass takes them; and
            ``has_lines`` for a text that may have line breaks and tabs.
    """
    metadata |= {"help": help, "at_least": at_least, "above": above, "within": within, "needs": needs, "file": file}
    if file is not None:
        metadata.setdefault("metavar", FILE_KINDS[file])
    return dataclasses.field(default=default, metadata={k: v for k, v in metadata.items() if v not in (None, "")})


def flag_rules(field: dataclasses.Field[Any]) -> list[str]:
    """Return the values that a flag accepts and its needs in a few words, for ``--help`` and the docs."""
    words = {"at_least": "at least {:g}", "above": "above {:g}", "within": "in {}", "needs": "needs {}"}
    return [text.format(field.metadata[name]) for name, text in words.items() if name in field.metadata]


def flag_name(field: str) -> str:
    """Spell a field as its flag: ``eps_clip`` is ``--eps-clip``."""
    return "--" + field.replace("_", "-")


def flag_choices(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """Return the values that a flag accepts, or nothing if it is not limited to some."""
    return get_args(field.type) if get_origin(field.type) is Literal else tuple(field.metadata.get("choices") or ())


@cache
def _interval(text: str) -> tuple[float, float]:
    """Return the ends of an interval such as ``(0, 1]``."""
    low, _, high = text[1:-1].partition(",")
    return float(low), float(high)


def count(number: int, noun: str) -> str:
    """Spell a count: ``1 step``, ``2 steps``, ``2 trajectories``."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun}" if number == 1 else f"{number} {plural}"


def changed(section: Any, names: Iterable[str]) -> list[str]:
    """Return the named fields whose values differ from their defaults: the ones that the user has set."""
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
        refused = {match[0] for message in self.messages if (match := re.match(r"--[\w-]+", message))}
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
        text = "" if value is None or value is True else f" {one_line(words, LONGEST_VALUE)}"
        self.add(f"{flag_name(field)}{text}: {rule}; {what_to_do}")

    def require(self, field: str, value: Any, meaning: str) -> None:
        """Refuse a missing flag."""
        if value is None and self.none_about(field):
            name = flag_name(field)
            self.add(f"{name} is required: {meaning}; add {name} to the command")

    def words(self, section: T) -> T:
        """Check choices and texts; return ``section`` with the defaults instead of wrong ones, for other rules."""
        wrong: dict[str, Any] = {}
        for field in fields(section):  # type: ignore[arg-type]
            value = getattr(section, field.name)
            accepted = flag_choices(field)
            before = len(self.messages)
            if value is not None and accepted and value not in accepted:
                self.refuse(field.name, value, "no such choice", f"give one of {', '.join(accepted)}")
            for word in value if isinstance(value, tuple) else (value,):
                if isinstance(word, str) and value != field.default and not accepted:
                    self._text(field, word)
            if len(self.messages) > before:
                wrong[field.name] = field.default
        return dataclasses.replace(section, **wrong)  # type: ignore[type-var]

    def declared(self, section: Any) -> None:
        """Check every number and path of ``section`` against its declaration."""
        for field in fields(section):
            value = getattr(section, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    self._number(field, number)
            if "file" in field.metadata and value is not None:
                self._file(field, value)

    def _text(self, field: dataclasses.Field[Any], word: str) -> None:
        """Check that a text is not empty, and has no characters that no file and no message can hold."""
        blank_is_empty = field.name != "rollout_stop"  # a response may well end at a line break
        if not (word.strip() if blank_is_empty else word):
            self.add(f"{flag_name(field.name)}: the value is empty; give one, or drop {flag_name(field.name)}")
        elif (rule := fault_of_text(word, bool(field.metadata.get("has_lines")))) is not None:
            self.refuse(field.name, word, rule, "correct the value")
        elif field.metadata.get("metavar") in PATH_METAVARS:
            rule = fault_of_path(word, field.metadata.get("file", "").startswith("new"))
            if rule is not None:
                self.refuse(field.name, one_line(word, LONGEST_PATH_IN_ERROR), rule, "give a shorter one")

    def _number(self, field: dataclasses.Field[Any], number: float) -> None:
        """Check that a number is in its declared range, and no larger than anything of its kind."""
        if (rule := fault_of_size(field.name, number)) is not None:
            self.refuse(field.name, number, rule, "give a number nearer to 0")
            return
        low, above, within = (field.metadata.get(name) for name in ("at_least", "above", "within"))
        if within is not None:
            lowest, highest = _interval(within)
            is_above = number > lowest or (number == lowest and within[0] == "[")
            is_below = number < highest or (number == highest and within[-1] == "]")
            if not (is_above and is_below):
                end = lowest if within[0] == "(" else highest if within[-1] == ")" else None
                but_not = "" if end is None else f", but not {end:g}"
                what_to_do = f"give a number from {lowest:g} to {highest:g}{but_not}"
                self.refuse(field.name, number, f"must be in {within}", what_to_do)
        elif low is not None and not (math.isfinite(number) and number >= low):
            self.refuse(field.name, number, f"must be a finite number of at least {low:g}", f"give {low:g} or more")
        elif above is not None and not (math.isfinite(number) and number > above):
            self.refuse(
                field.name, number, f"must be a finite number above {above:g}", f"give a number above {above:g}"
            )
        elif not math.isfinite(number):
            self.refuse(field.name, number, "must be a finite number", "give a number")

    def _file(self, field: dataclasses.Field[Any], path: str) -> None:
        match field.metadata["file"]:
            case "file":
                self.existing_file(field.name, path)
            case "model":
                self.existing_folder(field.name, path)
            case "folder" | "new folder":
                self.folder_to_write(field.name, path)
            case "new file" if os.path.isdir(path):
                self.refuse(field.name, path, "is a folder", "give the path of a file")

    def json_object(self, field: str, text: str | None) -> dict[str, Any]:
        """Return the object that a JSON flag holds; an empty one if the flag is not given or holds none."""
        if text is None:
            return {}
        try:
            value = strict_json.loads(text)
        except strict_json.StrictJsonError as error:
            self.refuse(field, text, str(error), 'write an object in single quotes, \'{"key": "value"}\'')
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
            what_to_do = "check the path; it is relative to the folder where the run starts"
            self.refuse(field, path, "no such file", what_to_do)
        return False

    def folder_to_write(self, field: str, path: str) -> None:
        """Check that ``path`` is no file, nor below one. It may be missing."""
        if "://" in path or os.path.isdir(path):
            return
        if os.path.isfile(path):
            self.refuse(field, path, "is a file", "give a folder")
        elif (file := _file_above(path)) is not None:
            self.refuse(field, path, f"is below {one_line(file, LONGEST_VALUE)}, which is a file", "give a folder")

    def existing_folder(self, field: str, path: str) -> None:
        """Check that ``path`` is a folder, unless it can be a name on a hub: one word, or two with a slash between."""
        if "://" in path:
            self.refuse(field, path, "is a URL", "copy the files to a folder of this machine, and give that")
        elif os.path.isdir(path):
            return
        elif os.path.isfile(path):
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
    """Return the rule that a path breaks if it is too long for any file system here, or for a run's files there."""
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
    """Return the rule that a number breaks which is larger than anything of its kind; inf has its own rules."""
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
require = _first_error.require
json_object = _first_error.json_object
