"""Read the training command of a shell script: its words, with the script's own variables and arrays filled in.

Nothing is run. A variable that the script does not set, and a command substitution, stay as they are written.
"""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from miles.translate.reading.tables import scalar
from miles.translate.settings import Document, Expression, Setting, by_key, fail

# What the words of a training command contain, and how its settings are written.
COMMANDS = (
    (re.compile(r"^verl\.|main_ppo|main_dapo"), "overrides"),
    (re.compile(r"^openrlhf\.|train_ppo_ray"), "flags"),
    (re.compile(r"(^|/)train(_async)?\.py$"), "flags"),
)
HYDRA_FLAGS = {"--config-path": "--config-path", "-cp": "--config-path", "--config-name": "--config-name"}
HYDRA_FLAGS |= {"-cn": "--config-name"}
MOST_WORDS = 50_000

_ASSIGNMENT = re.compile(r"^(?:[A-Za-z_]\w*)\+?=")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(\[@\]|\[\*\])?(?::?-([^{}]*))?\})")
_OVERRIDE = re.compile(r"^(\+{0,2})([A-Za-z_][\w.\-/@]*)=(.*)$", re.DOTALL)
_SEPARATORS = re.compile(r"^[\n;&|()]+$")
_NUMBER = re.compile(r"^-\.?\d")


@dataclass(frozen=True)
class _Word:
    text: str
    line: int


def read_shell(path: str, text: str) -> Document:
    """Read the last training command of a script."""
    commands = list(_commands(_tokens(path, text), {}))
    for command in reversed(commands):
        for pattern, style in COMMANDS:
            places = [number for number, word in enumerate(command) if pattern.search(word.text)]
            if places:
                rest = command[places[0] + 1 :]
                found = _overrides(rest) if style == "overrides" else _flags(rest)
                return Document(path, "shell", by_key(found), tuple(word.text for word in command))
    fail(path, 1, "has no training command (verl's main_ppo, openrlhf.cli.train_ppo_ray, train.py); check the file")


def _tokens(path: str, text: str) -> list[_Word]:
    # A continued line is a blank that still counts as a line.
    text = re.sub(r"\\\n", "\v", text)
    stream = io.StringIO(text)
    lexer = shlex.shlex(stream, posix=True, punctuation_chars="\n;&|()")
    lexer.whitespace, lexer.whitespace_split = " \t\r\v", True
    words: list[_Word] = []
    while True:
        try:
            token = lexer.get_token()
        except ValueError as error:
            fail(path, text.count("\n") + text.count("\v"), f"not a shell script ({error}); check its quotes")
        if token is None:
            return words
        at = max(stream.tell() - 1, 0)
        line = text.count("\n", 0, at) + text.count("\v", 0, at) + 1
        if _SEPARATORS.match(token):
            line -= token.count("\n")
        words.append(_Word(token, max(line, 1)))
        if len(words) > MOST_WORDS:
            fail(path, words[-1].line, f"has more than {MOST_WORDS} words; give the launch script alone")


def _commands(tokens: Sequence[_Word], variables: dict[str, list[str]]) -> Iterator[list[_Word]]:
    """Split the tokens into commands, follow assignments and fill in variables."""
    command: list[_Word] = []
    position = 0
    while position < len(tokens):
        word = tokens[position]
        position += 1
        if _SEPARATORS.match(word.text):
            if command:
                yield command
            command = []
            continue
        if _ASSIGNMENT.match(word.text) and all(known.text in ("export", "declare", "-a") for known in command):
            name, _, value = word.text.partition("=")
            values = _expand(value, variables)
            if not value and position < len(tokens) and tokens[position].text.startswith("("):
                values, position = _array(tokens, position, variables)
            before = variables.get(name.rstrip("+"), []) if name.endswith("+") else []
            variables[name.rstrip("+")] = [*before, *values]
            command = []
            continue
        command += [_Word(text, word.line) for text in _expand(word.text, variables)]
    if command:
        yield command


def _array(tokens: Sequence[_Word], position: int, variables: dict[str, list[str]]) -> tuple[list[str], int]:
    values: list[str] = []
    while position < len(tokens):
        text = tokens[position].text
        position += 1
        if not _SEPARATORS.match(text):
            values += _expand(text, variables)
        elif ")" in text:
            break
    return values, position


def _expand(text: str, variables: dict[str, list[str]]) -> list[str]:
    whole = _VARIABLE.fullmatch(text)
    if whole and (whole[1] or whole[2]) in variables:
        return variables[whole[1] or whole[2]]

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in variables:
            return " ".join(variables[name])
        return match[4] if match[4] is not None else match[0]

    return [_VARIABLE.sub(value, text)]


def _overrides(words: Sequence[_Word]) -> list[Setting]:
    """Read Hydra's ``key=value``, and which file of settings it names. Other words are listed by themselves."""
    found: list[Setting] = []
    for word, before in zip(words, [None, *words], strict=False):
        flag, equals, value = word.text.partition("=")
        if match := _OVERRIDE.match(word.text):
            found.append(Setting(match[2], _text(match[3], as_yaml=True), word.line))
        elif flag in HYDRA_FLAGS and equals:
            found.append(Setting(HYDRA_FLAGS[flag], _text(value), word.line))
        elif before is not None and before.text in HYDRA_FLAGS:
            found.append(Setting(HYDRA_FLAGS[before.text], _text(word.text), before.line))
        elif word.text not in ("$@", "2>", "1", ">", *HYDRA_FLAGS):
            found.append(Setting(word.text, True, word.line))
    return found


def _flags(words: Sequence[_Word]) -> list[Setting]:
    """Read ``--flag``, ``--flag value``, ``--flag=value`` and ``--flag a b``."""
    found: list[Setting] = []
    for word in words:
        if word.text.startswith("-") and not _NUMBER.match(word.text):
            flag, equals, value = word.text.partition("=")
            found.append(Setting(flag, _text(value) if equals else True, word.line))
        elif not found:
            found.append(Setting(word.text, True, word.line))
        else:
            last = found[-1]
            if last.value is True:
                value_ = _text(word.text)
            else:
                value_ = [*(last.value if isinstance(last.value, list) else [last.value]), _text(word.text)]
            found[-1] = Setting(last.key, value_, last.line)
    return found


def _text(text: str, as_yaml: bool = False) -> object:
    if "$" in text or "`" in text:
        return Expression(text)
    return scalar(text) if as_yaml else text
