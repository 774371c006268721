r"""Read an ``@file``: lines of flags, or a shell script that sets arrays of flags and is sourced by other scripts.

::

    EXPERTS=${EXPERTS:-8}
    MODEL_ARGS=(
       --num-layers 2 \
       --num-experts $EXPERTS  # a comment
    )

In a script, the words of all arrays are read, with the variables that the script sets, or else the variables of the
environment, and arithmetic of them. No shell runs: a line that needs one is refused.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable
from typing import NoReturn

from miles.base.flags import LONGEST_VALUE
from miles.base.shell_text import arithmetic
from miles.base.text import one_line
from miles.config.notes import written
from miles.config.spelling import flags_in, group_words, without_flags

LARGEST_FILE = 1_000_000  # characters
_STACKED = "--config"  # its files add up, and a later one does not replace an earlier one
MOST_FILES = 1000  # that a command line reads, with those that they name

_NAME = r"[A-Za-z_]\w*"
_DECLARES = r"(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?"
_OPENS = re.compile(rf"\s*{_DECLARES}({_NAME})\+?=\(")
_ASSIGNS = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_IS_SCRIPT = re.compile(rf"\A#!|^\s*{_DECLARES}(?:{_NAME}\+?=\(|[A-Z_][A-Z0-9_]*=[^\s=])", re.MULTILINE)
_EXPANDS = re.compile(rf"\$\{{({_NAME})(?::?-([^}}]*))?\}}")
_EXPANDS_IN_SCRIPT = re.compile(rf"{_EXPANDS.pattern}|\$({_NAME})")
_WHOLE_ARRAY = re.compile(rf"\$\{{({_NAME})\[[@*]\]\}}")
_SETTINGS_OF_SHELL = ("set", "shopt", "export", "readonly", "declare", "typeset")
# Signs that quotes make plain text, and their replacements until the words are split.
_QUOTED = {"$": "\ue000", "`": "\ue001", ")": "\ue002"}
_CLOSES = f"[){_QUOTED[')']}]"  # in quotes too
_ARITHMETIC = re.compile(rf"\$\(\((?:[^(){_QUOTED[')']}]|\([^(){_QUOTED[')']}]*{_CLOSES})*{_CLOSES}{{2}}")
_COMPUTED = re.compile(r"\$\(\([^)]*\)?\)?|\$\([^)]*\)?|`[^`]*`?")
_RUN_IT = "start the script itself with bash, or keep only its variables and arrays in the file"


def with_words_of_files(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command, with the words of each file instead of its ``@file``. A file may name others.

    Flags after a file replace the same flags in it; they are returned too, as ``--flag value (file)``.

    Raises:
        ValueError: A file cannot be read, or files include each other without end; the message states what to do.
    """
    files, given = _Files(), list(words)
    parts = [files.words([word]) for word in given]
    later, replaced = set[str](), list[str]()
    for number, word in reversed([*enumerate(given)]):
        if word.startswith("@"):
            of_file = group_words(parts[number])
            replaced[:0] = [f"{written(flag, values)} ({word[1:]})" for flag, values in of_file if flag in later]
            parts[number] = without_flags(parts[number], later)
        later |= {*flags_in(parts[number])} - {_STACKED}
    return [word for part in parts for word in part], replaced


class _Files:
    """The files that one command reads."""

    def __init__(self) -> None:
        self._read = 0

    def words(self, words: Iterable[str], within: tuple[str, ...] = ()) -> list[str]:
        """Return the words, which are ``within`` the files of these paths."""
        found: list[str] = []
        for word in words:
            found += self._words_of(word[1:], within) if word.startswith("@") else [word]
        return found

    def _words_of(self, path: str, within: tuple[str, ...]) -> list[str]:
        text, found = self._text(path, within), list[str]()
        file = FlagsFile(text)
        for line in text.splitlines():
            try:
                words = file.words(line)
            except ValueError as error:
                shown = one_line(line, LONGEST_VALUE)
                raise ValueError(f"cannot read the line {shown!r} of the @file: {error}") from None
            found += self.words(words, (*within, os.path.realpath(path)))
        try:
            file.end()
        except ValueError as error:
            _refuse(path, "cannot be read", str(error))
        return found

    def _text(self, path: str, within: tuple[str, ...]) -> str:
        if "\0" in path:
            _refuse(path, "has a zero byte in its name", "check the path")
        try:
            if os.path.realpath(path) in within:
                _refuse(path, "includes itself", "remove the line that names it")
            self._read += 1
            if self._read > MOST_FILES:
                _refuse(path, f"is one of more than {MOST_FILES}", "name fewer of them")
            with open(path, encoding="utf-8") as file:
                text = file.read(LARGEST_FILE + 1)
        except OSError as error:
            _refuse(path, f"cannot be read ({error.strerror})", "check the path")
        except UnicodeDecodeError:
            _refuse(path, "is not UTF-8 text", "check the path")
        if len(text) > LARGEST_FILE:
            _refuse(path, f"has more than {LARGEST_FILE} characters", "check the path")
        return text


def _refuse(path: str, fault: str, what_to_do: str) -> NoReturn:
    raise ValueError(f"@{one_line(path, LONGEST_VALUE)}: the file of flags {fault}; {what_to_do}")


class FlagsFile:
    """Read the lines of a file in order.

    Args:
        text: The whole file.
    """

    def __init__(self, text: str) -> None:
        self._is_script = _IS_SCRIPT.search(text) is not None
        self._variables = dict[str, str]()
        self._arrays = set[str]()
        self._in_array = False

    def words(self, line: str) -> list[str]:
        """Split the next line into words of a command: quoting as in a shell, ``#`` starts a comment.

        Raises:
            ValueError: The line cannot be read; the message ends with what to do.
        """
        opened = _OPENS.match(line)
        if opened and not self._in_array:
            self._in_array = True
            self._arrays.add(opened[1])
            line = line[opened.end() :]
        line = line.rstrip()
        if line.endswith("\\") and not line.endswith("\\\\"):
            line = line[:-1]
        try:
            masked = _mask_quoted(line)
            words = shlex.split(_ARITHMETIC.sub(self._computed, masked) if self._is_script else masked, comments=True)
        except ValueError as error:
            raise ValueError(f"{error}; check its quotes") from None
        if self._is_script:
            self._refuse_computed(words)
        if self._in_array:
            words = self._until_closed(words)
        elif self._is_script and words:
            words = self._outside_arrays(words)
        return [self._expand(word) for word in words if not self._is_read_already(word)]

    def end(self) -> None:
        """Check the end of the file. Raises ``ValueError`` if an array is still open."""
        if self._in_array:
            raise ValueError("an array has no end; close it with )")

    def _computed(self, match: re.Match[str]) -> str:
        """Return the value of arithmetic, or its text if a variable in it is not known."""
        found = arithmetic(_unmask(match[0]), lambda name: self._variables.get(name) or os.environ.get(name))
        return match[0] if found is None else str(found)

    def _refuse_computed(self, words: list[str]) -> None:
        for word in words:
            found = _COMPUTED.search(word)
            if found is not None:
                does = "is arithmetic" if found[0].startswith("$((") else "runs a command"
                raise ValueError(f"{_unmask(found[0])} {does}, and no shell runs here; {_RUN_IT}")

    def _until_closed(self, words: list[str]) -> list[str]:
        for index, word in enumerate(words):
            last, closed, more = word.partition(")")
            if closed:
                self._in_array = False
                if more.strip(";") or words[index + 1 :]:
                    raise ValueError("words follow the end of the array; begin a line with them")
                return [*words[:index], *([last] if last else [])]
        return words

    def _outside_arrays(self, words: list[str]) -> list[str]:
        """Set the variables that the words assign, or return flags. Raises ``ValueError`` for a command."""
        assigned = [word for word in words if _ASSIGNS.fullmatch(word)]
        first = words[0]
        if first in _SETTINGS_OF_SHELL or len(assigned) == len(words):
            for word in assigned:
                self._assign(word)
            return []
        if first.startswith(("--", "@")):
            return words
        raise ValueError(f"{_unmask(first)} is a command, and no shell runs here; {_RUN_IT}")

    def _assign(self, word: str) -> None:
        found = _ASSIGNS.fullmatch(word)
        assert found is not None
        name, appends, value = found[1], found[2], self._expand(found[3].removesuffix(";"))
        self._variables[name] = self._variables.get(name, "") + value if appends else value

    def _is_read_already(self, word: str) -> bool:
        """Return whether a word stands for all words of an array of this file."""
        found = _WHOLE_ARRAY.fullmatch(word)
        return found is not None and found[1] in self._arrays

    def _expand(self, word: str) -> str:
        def value(found: re.Match[str]) -> str:
            name = found[1] or found[3]  # the third group is for a script
            given = self._variables.get(name) or os.environ.get(name) or found[2]
            if given is None and name in self._variables:
                return ""
            if given is None:
                raise ValueError(f"the variable {name} is not set; set it in the environment")
            return given

        if not self._is_script:
            return _unmask(_EXPANDS.sub(value, word))
        expanded = _EXPANDS_IN_SCRIPT.sub(value, word)
        if "${" in _EXPANDS_IN_SCRIPT.sub("", word):
            raise ValueError(f"{_unmask(word)} needs a shell; {_RUN_IT}")
        return _unmask(expanded)


def _mask_quoted(line: str) -> str:
    """Replace signs of the shell that are plain text: in single quotes, after a backslash, and ``)`` in any quotes."""
    masked, quote, escaped = list[str](), "", False
    for sign in line:
        if escaped:
            masked[-1:] = [_QUOTED[sign]] if sign in _QUOTED else ["\\", sign]
        elif sign in _QUOTED and (quote == "'" or (quote and sign == ")")):
            masked.append(_QUOTED[sign])
        else:
            masked.append(sign)
            if sign in "'\"" and quote in ("", sign):
                quote = "" if quote else sign
        escaped = sign == "\\" and quote != "'" and not escaped
    return "".join(masked)


def _unmask(word: str) -> str:
    for sign, mask in _QUOTED.items():
        word = word.replace(mask, sign)
    return word
