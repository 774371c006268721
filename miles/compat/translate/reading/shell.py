"""Read the training command of a shell script: its words, with the script's own variables and arrays filled in.

Nothing is run. A variable that the script does not set, or sets in a branch or a loop, and a command substitution stay
as they are written. A file beside the script that it sources is read for its variables and arrays too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from miles.base.input_error import InputError
from miles.compat.translate.reading.shell_words import Word, words_of
from miles.compat.translate.reading.tables import scalar
from miles.compat.translate.reading.text import read_text
from miles.compat.translate.reading.value_counts import most_values
from miles.compat.translate.settings import Document, Expression, Setting, by_key, fail

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
_NUMBER = re.compile(r"^-\.?\d")
_EXPANSION = re.compile(r"\$(?:[@*]|\w+|\{[^{}]*\})")  # a word that is one variable
_ALL_WORDS = re.compile(r"\$(?:[@*]|\{(?:[@*]|\w+\[[@*]\]).*\})")  # all words of an array, or of the script
_HOLDS_FLAGS = re.compile(r"\$\{?\w*(?:args|flags|opts|options|overrides)\b", re.IGNORECASE)
_FIRST_FOLDER = re.compile(r"^\$(?:\{?\w+\}?|\(.*\))/")  # the folder of the script, by the habit of such scripts
_BEFORE_A_COMMAND = ("export", "declare", "-a", "local", "readonly", "then", "else", "do", "{")
_BEGIN_BRANCHES = ("if", "case", "for", "while", "until", "select")
_END_BRANCHES = ("fi", "esac", "done")
_REDIRECTION = re.compile(r"^(?:\d|&)?(>>?|<)(.*)$")


@dataclass
class _Scope:
    """Hold what a script has set so far, and the files that it sources and that were not read."""

    folder: Path
    variables: dict[str, list[str]] = field(default_factory=dict)
    not_read: list[str] = field(default_factory=list)
    in_branches: set[str] = field(default_factory=set)  # the variables that a branch or a loop sets
    seen: set[Path] = field(default_factory=set)

    def source(self, name: str) -> None:
        """Take the variables of a sourced file, if it is beside the script."""
        relative = _FIRST_FOLDER.sub("", name)
        expanded = "".join(_expand(Word(relative, 1, is_quoted=True), self.variables))
        found = (base / expanded for base in (self.folder, Path()))
        file = next((path.resolve() for path in found if os.path.isfile(path)), None)  # false for an impossible name
        if Path(expanded).is_absolute() or file is None:
            self.not_read.append(name)
        elif file not in self.seen:
            self.seen.add(file)
            try:
                for _ in _commands(_tokens(str(file), read_text(str(file))), self):
                    continue  # its assignments count, and its commands do not
            except InputError:
                self.not_read.append(name)


def read_shell(path: str, text: str) -> Document:
    """Read the last training command of a script; one in a here-document only if there is no other."""
    for reads_documents in (False, True):
        scope = _Scope(Path(path).parent)
        commands = list(_commands(_tokens(path, text, reads_documents), scope))
        for command in reversed(commands):
            for pattern, style in COMMANDS:
                places = [number for number, word in enumerate(command) if pattern.search(word.text)]
                if places:
                    rest = list(_without_redirections(command[places[0] + 1 :]))
                    found, elsewhere = _overrides(rest) if style == "overrides" else _flags(rest)
                    words = tuple(word.text for word in command)
                    notes = by_key(_set_elsewhere(word, scope) for word in elsewhere)
                    return Document(path, "shell", by_key(found), words, notes)
    fail(path, 1, "has no training command (verl's main_ppo, openrlhf.cli.train_ppo_ray, train.py); check the file")


def _without_redirections(words: Sequence[Word]) -> Iterator[Word]:
    """Leave out ``> FILE`` and ``2>&1``."""
    names_file = False
    for word in words:
        match = None if word.is_quoted else _REDIRECTION.match(word.text)
        if not match and not names_file:
            yield word
        names_file = match is not None and not match[2]


def _set_elsewhere(word: Word, scope: _Scope) -> Setting:
    """Describe the source of the flags that an expansion stands for."""
    name = word.text.strip("${}")
    if name[0] in "@*":
        where = "is what the script is called with: give those flags too"
    elif name.partition("[")[0] in scope.in_branches:
        where = "is set in a branch or a loop of the script: give the flags that hold for you too"
    elif scope.not_read:
        where = f"is set elsewhere (source {' or '.join(scope.not_read)}): give that file's flags too"
    else:
        where = "is not set in this file: give its flags too"
    return Setting(word.text, where, word.line)


def _tokens(path: str, text: str, reads_documents: bool = False) -> list[Word]:
    words: list[Word] = []
    try:
        for word in words_of(path, text, reads_documents):
            words.append(word)
            if len(words) > MOST_WORDS:
                fail(path, word.line, f"has more than {MOST_WORDS} words; give the launch script alone")
    except RecursionError:
        fail(path, words[-1].line if words else 1, "its quotes are nested too deep; give the launch script alone")
    return words


def _commands(tokens: Sequence[Word], scope: _Scope) -> Iterator[list[Word]]:
    """Split the tokens into commands, follow assignments and sourced files, and fill in variables."""
    command: list[Word] = []
    position = depth = 0  # the depth of branches and loops
    separators = ""  # since the last word
    while position < len(tokens):
        word = tokens[position]
        position += 1
        if word.separates:
            if command:
                yield command
            command = []
            separators += word.text
            continue
        is_certain = not depth and not separators.endswith(("&&", "||"))
        separators = ""
        if all(known.text in _BEFORE_A_COMMAND for known in command):
            if _ASSIGNMENT.match(word.text):
                position = _assign(word, tokens, position, scope, is_certain)
                command = []
                continue
            depth += (word.text in _BEGIN_BRANCHES) - (word.text in _END_BRANCHES)
        if len(command) == 1 and command[0].text in ("source", "."):
            scope.source(word.text)
        expanded = _expand(word, scope.variables)
        command += [Word(text, word.line, word.is_quoted or text != word.text) for text in expanded]
    if command:
        yield command


def _assign(word: Word, tokens: Sequence[Word], position: int, scope: _Scope, is_certain: bool) -> int:
    """Note what ``word`` assigns; return the position of the next token.

    What is assigned in a branch, or after ``&&``, is not known: the variable, or its last part, stands for itself.
    """
    name, _, value = word.text.partition("=")
    name, appends = name.removesuffix("+"), name.endswith("+")
    before = scope.variables.get(name, []) if appends else []
    is_array = not value and position < len(tokens) and tokens[position].separates and tokens[position].text == "("
    if is_array:
        values, position = _array(tokens, position, scope.variables)
    else:
        values = _expand(Word(value, word.line, is_quoted=True), scope.variables)
    if not is_certain:
        scope.in_branches.add(name)
        values = [f"${{{name}[@]}}" if is_array or appends else f"${name}"]
    elif before and not is_array:  # a text is lengthened, and of an array its first element
        before, values = [], [before[0] + " ".join(values), *before[1:]]
    scope.variables[name] = [*before, *values]
    return position


def _array(tokens: Sequence[Word], position: int, variables: dict[str, list[str]]) -> tuple[list[str], int]:
    values: list[str] = []
    while position < len(tokens):
        word = tokens[position]
        position += 1
        if not word.separates:
            values += _expand(word, variables)
        elif word.text == ")":
            break
    return values, position


def _expand(word: Word, variables: dict[str, list[str]]) -> list[str]:
    """Return the words that a word becomes: a variable outside quotes is split at blanks, as a shell does."""
    whole = _VARIABLE.fullmatch(word.text)
    if whole and (whole[1] or whole[2]) in variables:
        values = variables[whole[1] or whole[2]]
        if word.is_quoted:
            return values
        return [part for value in values for part in ([value] if _is_computed(value) else value.split())]
    if whole and whole[4] == "":  # nothing, or whatever the caller sets
        return [word.text]

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name in variables:
            return " ".join(variables[name])
        return match[4] if match[4] is not None else match[0]

    return [_VARIABLE.sub(value, word.text)]


def _overrides(words: Sequence[Word]) -> tuple[list[Setting], list[Word]]:
    """Read Hydra's ``key=value``, and which file of settings it names. Other words are listed by themselves.

    The second result are the words that expand to settings which are not known.
    """
    found: list[Setting] = []
    elsewhere: list[Word] = []
    for word, before in zip(words, [None, *words], strict=False):
        flag, equals, value = word.text.partition("=")
        if match := _OVERRIDE.match(word.text):
            found.append(Setting(match[2], _text(match[3], as_yaml=True), word.line))
        elif flag in HYDRA_FLAGS and equals:
            found.append(Setting(HYDRA_FLAGS[flag], _text(value), word.line))
        elif before is not None and before.text in HYDRA_FLAGS:
            found.append(Setting(HYDRA_FLAGS[before.text], _text(word.text), before.line))
        elif _EXPANSION.fullmatch(word.text):
            elsewhere.append(word)
        elif word.text and word.text not in HYDRA_FLAGS:
            found.append(Setting(word.text, True, word.line))
    return found, elsewhere


def _flags(words: Sequence[Word]) -> tuple[list[Setting], list[Word]]:
    """Read ``--flag``, ``--flag value``, ``--flag=value`` and ``--flag a b``.

    The second result are the words that expand to flags which are not known.
    """
    found: list[Setting] = []
    elsewhere: list[Word] = []
    for word in words:
        if word.text.startswith("-") and not _NUMBER.match(word.text):
            flag, equals, value = word.text.partition("=")
            found.append(Setting(flag, _text(value) if equals else True, word.line))
        elif _EXPANSION.fullmatch(word.text) and not (found and _takes(found[-1], word.text)):
            elsewhere.append(word)
        elif not word.text and not (found and _takes(found[-1], word.text)):
            continue  # a variable that is set to nothing
        elif not found:
            found.append(Setting(word.text, True, word.line))
        else:
            found[-1] = Setting(found[-1].key, _added(found[-1].value, word.text), found[-1].line)
    return found, elsewhere


def _takes(last: Setting, text: str) -> bool:
    """Return whether an expansion is a value of the flag before it, and not flags of its own."""
    most, is_all_words = most_values(last.key), _ALL_WORDS.fullmatch(text) is not None
    if last.value is not True:
        given = len(last.value) if isinstance(last.value, list) else 1
        return most is not None and given < most and not is_all_words and not _HOLDS_FLAGS.match(text)
    if most is None:
        return not is_all_words and not _HOLDS_FLAGS.match(text)
    return most > 0


def _added(before: object, text: str) -> object:
    """Add a word to the values of a flag. All of them together are an expression if one of them is."""
    value = _text(text)
    if before is True:
        return value
    values = [*(before if isinstance(before, list) else [before]), value]
    if any(isinstance(each, Expression) for each in values):
        return Expression(" ".join(map(str, values)))
    return values


def _is_computed(text: str) -> bool:
    return "$" in text or "`" in text


def _text(text: str, as_yaml: bool = False) -> object:
    if _is_computed(text):
        return Expression(text)
    return scalar(text) if as_yaml else text
