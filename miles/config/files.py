"""Read files of settings: ``--config FILE key=value …`` and ``@file`` become words of the command line.

The keys of a YAML file are flags without ``--``, with ``_`` or ``-``, flat or below the names of the sections of
``--help``. Scalars are taken as written, so that YAML turns no ``1e-5`` into text and no ``no`` into false. The last
value on the command line wins: a flag replaces an entry of a file before it, and an entry with ``false`` or ``null``
takes back the values before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NoReturn

import yaml

from miles.base.flags import LONGEST_VALUE, Errors, flag_name
from miles.base.secrets import HIDDEN, public
from miles.base.shell_text import arithmetic
from miles.base.text import one_line
from miles.config.notes import written
from miles.config.servers.passed_on import is_passed_on
from miles.config.settings import SECTIONS, section_of
from miles.config.spelling import flags_in, group_words, most_values, without_flags
from miles.config.suggest import suggestion

FLAG = "--config"
LARGEST_FILE = 200_000  # characters
NO_SETTINGS = (FLAG, "--explain", "--help", "--version")  # flags that no file sets
# The groups where run.yaml has flags that are defined elsewhere, alongside the sections of our own flags.
MEGATRON_CORE, SERVER_FLAGS = "megatron_core", "server_flags"
_FOREIGN_SECTIONS = (MEGATRON_CORE, SERVER_FLAGS)

_NULL = ("", "~", "null")
# Switches that exclude each other: false for one asks for the other.
_OPPOSITES = {"--bf16": ("--fp32",), "--fp32": ("--bf16",)}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


class _Refused(Exception):
    """Describe the fault of an entry: ``rule; what to do``."""


@dataclass(frozen=True)
class _Entry:
    """One flag with its words.

    Attributes:
        flag: The flag.
        words: The flag and its values; empty for an entry that takes the flag back.
        origin: ``FILE:LINE`` for an entry of a file; empty for ``key=value`` after one; None for words of the command.
        text: The value, as written.
    """

    flag: str
    words: tuple[str, ...]
    origin: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Expanded:
    """Hold the words of a command line after each ``--config`` is replaced.

    Attributes:
        words: The words.
        origins: The line, ``FILE:LINE``, of each flag that a file sets.
        replaced: The flags of files that later words replace, as ``--flag value (FILE:LINE)``.
    """

    words: tuple[str, ...]
    origins: Mapping[str, str]
    replaced: tuple[str, ...] = ()


def located(messages: Iterable[str], origins: Mapping[str, str]) -> list[str]:
    """Add ``[FILE:LINE]`` to each message about a flag that a file sets."""
    flags = ((message, re.match(r"--[\w-]+", message)) for message in messages)
    return [
        f"{message} [{origins[flag[0]]}]" if flag is not None and flag[0] in origins else message
        for message, flag in flags
    ]


def expand_configs(
    words: Sequence[str],
    actions: Mapping[str, argparse.Action],
    further: Callable[[], Collection[str]],
    errors: Errors,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> Expanded:
    """Replace each ``--config FILE key=value …`` by the flags that it sets.

    Args:
        words: The words of a command line.
        actions: Our own flags.
        further: Returns all other flags that exist, except SGLang's. Called if an entry is not one of our flags.
        errors: Collects files that cannot be read, and entries that are no settings.
        keywords: Settings by name, as plain Python values; they replace the same flags among the words.
    """
    reader = _Reader(actions, further, errors)
    entries, replaced = list[_Entry](), list[str]()

    def put(entry: _Entry, replaces_all: bool) -> None:
        same = [e for e in entries if reader.destination(e.flag) == reader.destination(entry.flag)]
        if not replaces_all and entry.origin is not None:
            same = [e for e in same if e.origin]
        elif not replaces_all:  # a word of the command repeats another word, and the parser takes the last one
            same = [e for e in same if e.origin is not None]
        replaced.extend(f"{written(e.flag, e.text)} ({e.origin})" for e in same if e.origin and e.words)
        entries[:] = [*(e for e in entries if e not in same), entry]

    for entry in reader.entries(words):
        put(entry, replaces_all=not entry.words)
    for entry in reader.keywords(keywords):
        put(entry, replaces_all=True)
    for entry in entries:
        if entry.origin and HIDDEN in entry.text:
            what_to_do = f"give {entry.flag} after {FLAG} FILE, or set it to null"
            errors.add(f"{FLAG} {entry.origin}: {entry.flag[2:]}: a secret was left out of the file; {what_to_do}")
    return Expanded(
        tuple(word for entry in entries for word in entry.words),
        {entry.flag: entry.origin for entry in entries if entry.origin},
        tuple(replaced),
    )


class _Reader:
    def __init__(
        self, actions: Mapping[str, argparse.Action], further: Callable[[], Collection[str]], errors: Errors
    ) -> None:
        self._actions = actions
        self._further = further
        self._errors = errors
        self._sections = {flag_name(field): section for field, section in section_of().items()}

    def destination(self, flag: str) -> str:
        """Return the field that a flag sets; the flag itself if it is not ours."""
        action = self._actions.get(flag)
        return flag if action is None else action.dest

    def entries(self, words: Sequence[str]) -> Iterator[_Entry]:
        """Yield the entries of a command line in order. After a file, ``key=value`` may also follow another flag."""
        position, file = 0, ""
        while position < len(words):
            word = words[position]
            flag, equals, path = word.partition("=")
            values = list(takewhile(lambda value: not value.startswith("--"), words[position + 1 :]))
            position += 1 + len(values)
            if flag != FLAG:
                most = most_values(self._actions[flag]) if flag in self._actions else 1
                if equals:
                    most = 0
                pairs = [word.partition("=") for word in values[most:]]  # key=value with a key of ours
                are_ours = all(sign and flag_name(key.rpartition(".")[2]) in self._actions for key, sign, _ in pairs)
                overrides = values[most:] if file and are_ours else []
                of_flag = values[: len(values) - len(overrides)]
                yield _Entry(flag if flag.startswith("--") else "", (word, *of_flag))
                for override in overrides:
                    yield from self._of_override(file, override)
                continue
            if not equals:
                path = values.pop(0) if values else ""
            if not path:
                self._errors.add(f"{FLAG}: expected the path of a YAML file; write {FLAG} FILE")
                continue
            file = path
            yield from self._of_file(path)
            for override in values:
                yield from self._of_override(path, override)

    def _of_file(self, path: str) -> Iterator[_Entry]:
        label = one_line(path, LONGEST_VALUE)
        try:
            root = _composed(path)
        except _Refused as refused:
            self._errors.add(f"{FLAG} {label}{refused}")
            self._errors.raise_if_any()  # without its settings, others would be missing or contradict
        seen = dict[str, str]()
        for key, value in root.value:
            name = _field(key)
            is_section = name in SECTIONS or name in _FOREIGN_SECTIONS
            if is_section and isinstance(value, yaml.MappingNode):
                for inner, inner_value in value.value:
                    yield from self._of_pair(label, name, inner, inner_value, seen)
            elif not (is_section and _is_null(value)):
                yield from self._of_pair(label, "", key, value, seen)

    def _of_pair(
        self, path: str, section: str, key: yaml.Node, value: yaml.Node, seen: dict[str, str]
    ) -> Iterator[_Entry]:
        origin = f"{path}:{key.start_mark.line + 1}"
        try:
            flag = self._flag(_field(key), section)
            if flag in seen:
                raise _Refused(f"is set twice, first in {seen[flag]}; keep one of the two")
            seen[flag] = origin
            yield _Entry(flag, self._words(flag, value), origin, _text(value))
        except _Refused as refused:
            is_word = isinstance(key, yaml.ScalarNode)
            name = one_line(str(key.value), LONGEST_VALUE) if is_word else "a key that is no word"
            self._errors.add(f"{FLAG} {origin}: {name}: {refused}")

    def _of_override(self, path: str, override: str) -> Iterator[_Entry]:
        key, equals, text = override.partition("=")
        section, dot, name = key.rpartition(".")
        excerpt = one_line(" ".join(map(str, public(key, [override]))), LONGEST_VALUE)
        try:
            if not equals:
                raise _Refused("is not an override of the file; write key=value")
            if not text.strip():  # of an unset variable of a shell, for example
                raise _Refused(f"has no value; give one, or write {key}=null for the default")
            if dot and section not in SECTIONS and section not in _FOREIGN_SECTIONS:
                raise _Refused(f"{section} is not a section; write {name}=value")
            flag = self._flag(name.replace("-", "_"), section)
            yield _Entry(flag, self._words(flag, _value_node(text)), "", text)
        except _Refused as refused:
            excerpt = excerpt if equals else one_line(override, LONGEST_VALUE)
            self._errors.add(f"{FLAG} {one_line(path, LONGEST_VALUE)} {excerpt}: {refused}")

    def keywords(self, settings: Mapping[str, Any]) -> Iterator[_Entry]:
        """Yield the entries of settings that are Python values."""
        for name, value in settings.items():
            node = yaml.compose(json.dumps(value, default=str), Loader=_Loader)  # JSON is YAML
            try:
                flag = self._flag(name, "")
                yield _Entry(flag, self._words(flag, node), "", _text(node))
            except _Refused as refused:
                self._errors.add(f"{name}={one_line(str(public(name, value)), LONGEST_VALUE)}: {refused}")

    def _flag(self, name: str, section: str) -> str:
        """Return the flag of a key below ``section``."""
        spellings = (flag_name(name), "--" + name)
        for flag in spellings:
            if flag in NO_SETTINGS:
                raise _Refused("is not a setting of a run; give it on the command line")
            if flag in self._actions or is_passed_on(flag):
                right_section = self._sections.get(flag, section)
                if section and right_section != section:
                    raise _Refused(f"belongs to the section {right_section}; move it there")
                return flag
        further = self._further()
        for flag in spellings:
            if flag in further:
                return flag
        near = suggestion(spellings[0], [*(set(self._actions) - {*NO_SETTINGS}), *further])
        near = re.sub(r"--(\S+)\?", lambda match: match[1].replace("-", "_") + "?", near)
        raise _Refused(f"no such setting; {near}")

    def _words(self, flag: str, node: yaml.Node) -> tuple[str, ...]:
        """Return the words that set ``flag``; none if the value takes it back."""
        action = self._actions.get(flag)
        is_switch = action is not None and action.nargs == 0
        if isinstance(node, yaml.ScalarNode):
            return _scalar_words(flag, node, is_switch, is_ours=action is not None)
        if is_switch:
            raise _Refused("is a switch; write true or false")
        takes_many = action is None or action.nargs == "+"
        if takes_many and isinstance(node, yaml.SequenceNode):
            values = [_word(part) for item in node.value for part in _flat(item)]
        elif takes_many and action is not None:
            values = [_word(part) for pair in node.value for part in pair]
        else:
            return (f"{flag}={json.dumps(_json(node))}",)
        return (flag, *values) if values else ()


def _scalar_words(flag: str, node: yaml.ScalarNode, is_switch: bool, is_ours: bool) -> tuple[str, ...]:
    text = str(node.value)
    is_plain = node.style is None
    if is_plain and text.lower() in _NULL:
        return ()
    if is_switch or (is_plain and not is_ours):
        match text.lower():
            case "true":
                return (flag,)
            case "false":
                return _OPPOSITES.get(flag, ())
    if is_switch:
        raise _Refused("is a switch; write true or false")
    return (f"{flag}={text}",) if is_ours or text.startswith("-") else (flag, text)


class _Loader(yaml.BaseLoader):
    """Read YAML without types and without aliases, which can make a small file grow without bounds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias (*name) is not supported", problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


# Words of PyYAML's message, which of its marks is at the line at fault, and the fault.
_YAML_FAULTS = (
    ("'\\t' that cannot start", "problem_mark", "begins with a tab; write spaces, or nothing"),
    (
        "block end>, but found '<block mapping",
        "problem_mark",
        "begins further right than the line before; move it left",
    ),
    (
        "mapping values are not",
        "problem_mark",
        "has a second ': ', or begins too far right; quote the value, or move it",
    ),
    ("could not find expected ':'", "context_mark", "has no ': ' between key and value; write key: value"),
)


def _not_yaml(error: yaml.MarkedYAMLError) -> str:
    """Return the line and the fault of a file that is not YAML."""
    problem = str(error.problem)
    name, fault = "problem_mark", f"{one_line(problem, LONGEST_VALUE)}; correct the line"
    for words, name_of_mark, sentence in _YAML_FAULTS:
        if words in problem:
            name, fault = name_of_mark, sentence
    mark = getattr(error, name)
    line = "" if mark is None else f":{mark.line + 1}"
    return f"{line}: not YAML: {fault}"


def _composed(path: str) -> yaml.MappingNode:
    """Read a file. ``_Refused`` begins with the line, if there is one: ``:3: …``."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise _Refused(f": the file has more than {LARGEST_FILE} characters; check the path")
        root = yaml.compose(text, Loader=_Loader)
    except OSError as error:
        raise _Refused(f": the file cannot be read ({error.strerror}); check the path") from None
    except yaml.MarkedYAMLError as error:
        raise _Refused(_not_yaml(error)) from None
    except (yaml.YAMLError, ValueError):  # characters that YAML has not, not UTF-8, or a path with a zero byte
        raise _Refused(": the file is not UTF-8 text; check the path") from None
    except RecursionError:
        raise _Refused(": the file is nested too deeply; write key: value") from None
    if not isinstance(root, yaml.MappingNode):
        raise _Refused(": the file holds no settings; write one line, key: value, for each")
    return root


def _value_node(text: str) -> yaml.Node:
    """Return the value of ``key=value``: a list or an object in YAML's brackets, else the text itself."""
    if text.startswith(("[", "{")):
        try:
            node = yaml.compose(text, Loader=_Loader)
            if isinstance(node, yaml.CollectionNode):
                return node
        except (yaml.YAMLError, RecursionError):
            pass  # a value such as [0]*3+[1]*5
    return yaml.ScalarNode("", text)


def _field(key: yaml.Node) -> str:
    """Return a key as the name of a field; empty if it is none."""
    return str(key.value).removeprefix("--").replace("-", "_") if isinstance(key, yaml.ScalarNode) else ""


def _text(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else json.dumps(_json(node))


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and str(node.value).lower() in _NULL


def _flat(node: yaml.Node) -> list[yaml.Node]:
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _word(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _Refused("lists are nested too deeply; write one list of values")
    text = str(node.value)
    if text.startswith(("--", "@")):
        raise _Refused(f"a value in a list cannot start with {text[:2].rstrip('-') or '--'}; write ./ before a path")
    return text


def _json(node: yaml.Node) -> Any:
    """Return a value as JSON has it: plain scalars may be numbers, true, false and null."""
    if isinstance(node, yaml.MappingNode):
        return {_text(key): _json(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_json(item) for item in node.value]
    text = str(node.value)
    if node.style is None:
        if text.lower() in _NULL:
            return None
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        if _NUMBER.fullmatch(text):
            return json.loads(text)
    return text


# Read an ``@file``: lines of flags, or a shell script that sets arrays of flags and is sourced by other scripts.
#
# ::
#
#     EXPERTS=${EXPERTS:-8}
#     MODEL_ARGS=(
#        --num-layers 2 \
#        --num-experts $EXPERTS  # a comment
#     )
#
# In a script, the words of all arrays are read, with the variables that the script sets, or else the variables of the
# environment, and arithmetic of them. No shell runs: a line that needs one is refused.


LARGEST_FLAGS_FILE = 1_000_000  # characters
_STACKED = "--config"  # its files add up, and a later one does not replace an earlier one
MOST_FILES = 1000  # that a command line reads, with those that they name

_NAME = r"[A-Za-z_]\w*"
_DECLARES = r"(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?"
_OPENS = re.compile(rf"\s*{_DECLARES}({_NAME})\+?=\(")
_ASSIGNS = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_IS_SCRIPT = re.compile(rf"\A#!|^\s*{_DECLARES}(?:{_NAME}\+?=\(|[A-Z_][A-Z0-9_]*=[^\s=])", re.MULTILINE)
_EXPANDS = re.compile(rf"\$\{{({_NAME})(?::?-([^}}]*))?\}}")
_EXPANDS_IN_SCRIPT = re.compile(rf"{_EXPANDS.pattern}|\$({_NAME})")
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
    files = _Files()
    arguments = list(words)
    parts = [files.words([word]) for word in arguments]
    later, replaced = set[str](), list[str]()
    for number, word in reversed([*enumerate(arguments)]):
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
        result: list[str] = []
        for word in words:
            result += self._words_of(word[1:], within) if word.startswith("@") else [word]
        return result

    def _words_of(self, path: str, within: tuple[str, ...]) -> list[str]:
        text = self._text(path, within)
        result = list[str]()
        file = FlagsFile(text)
        for line in text.splitlines():
            try:
                words = file.words(line)
            except ValueError as error:
                excerpt = one_line(line, LONGEST_VALUE)
                raise ValueError(f"cannot read the line {excerpt!r} of the @file: {error}") from None
            result += self.words(words, (*within, os.path.realpath(path)))
        try:
            file.end()
        except ValueError as error:
            _refuse(path, "cannot be read", str(error))
        return result

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
                text = file.read(LARGEST_FLAGS_FILE + 1)
        except OSError as error:
            _refuse(path, f"cannot be read ({error.strerror})", "check the path")
        except UnicodeDecodeError:
            _refuse(path, "is not UTF-8 text", "check the path")
        if len(text) > LARGEST_FLAGS_FILE:
            _refuse(path, f"has more than {LARGEST_FLAGS_FILE} characters", "check the path")
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
        arrays = {f"${{{name}[{sign}]}}" for name in self._arrays for sign in "@*"}  # whose words are read already
        return [self._expand(word) for word in words if word not in arrays]

    def end(self) -> None:
        """Check the end of the file. Raises ``ValueError`` if an array is still open."""
        if self._in_array:
            raise ValueError("an array has no end; close it with )")

    def _computed(self, match: re.Match[str]) -> str:
        """Return the value of arithmetic, or its text if a variable in it is not known."""
        number = arithmetic(_unmask(match[0]), lambda name: self._variables.get(name) or os.environ.get(name))
        return match[0] if number is None else str(number)

    def _refuse_computed(self, words: list[str]) -> None:
        for word in words:
            match = _COMPUTED.search(word)
            if match is not None:
                does = "is arithmetic" if match[0].startswith("$((") else "runs a command"
                raise ValueError(f"{_unmask(match[0])} {does}, and no shell runs here; {_RUN_IT}")

    def _until_closed(self, words: list[str]) -> list[str]:
        for index, word in enumerate(words):
            last, closed, more = word.partition(")")
            if closed:
                self._in_array = False
                if more.strip(";") or words[index + 1 :]:
                    raise ValueError("words follow the end of the array; begin a line with them")
                return words[:index] + ([last] if last else [])
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
        match = _ASSIGNS.fullmatch(word)
        assert match is not None
        name, appends = match[1], match[2]
        value = self._expand(match[3].removesuffix(";"))
        self._variables[name] = self._variables.get(name, "") + value if appends else value

    def _expand(self, word: str) -> str:
        def value(match: re.Match[str]) -> str:
            name = match[1] or match[3]  # the third group is for a script
            text = self._variables.get(name) or os.environ.get(name) or match[2]
            if text is None and name in self._variables:
                return ""
            if text is None:
                raise ValueError(f"the variable {name} is not set; set it in the environment")
            return text

        if not self._is_script:
            return _unmask(_EXPANDS.sub(value, word))
        expanded = _EXPANDS_IN_SCRIPT.sub(value, word)
        if "${" in _EXPANDS_IN_SCRIPT.sub("", word):
            raise ValueError(f"{_unmask(word)} needs a shell; {_RUN_IT}")
        return _unmask(expanded)


def _mask_quoted(line: str) -> str:
    """Replace signs of the shell that are plain text: in single quotes, after a backslash, and ``)`` in any quotes."""
    masked = list[str]()
    quote, escaped = "", False
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
