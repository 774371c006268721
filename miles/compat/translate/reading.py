"""Read the text of a file."""

from __future__ import annotations

import ast
import math
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from miles.base import strict_json
from miles.base.text import InputError
from miles.compat.translate.launchers import openrlhf, openrlhf_underscores
from miles.compat.translate.translation import Document, Expression, Setting, by_key, fail, flatten
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import MODEL_FLAGS, megatron_fields
from miles.config.parser import build_parser

LARGEST_FILE = 1_000_000  # bytes


def read_text(path: str) -> str:
    """Return the text of a file, with newlines as line ends.

    Raises:
        InputError: The file cannot be read, is too large, or is no text: one sentence with file and line.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        fail(path, None, f"cannot be read ({reason}); check the path")
    if len(data) > LARGEST_FILE:
        fail(path, None, f"has more than {LARGEST_FILE} bytes; give the file of settings alone")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        fail(path, data.count(b"\n", 0, error.start) + 1, "is not UTF-8 text; save it as UTF-8")
    if "\0" in text:
        fail(path, text.count("\n", 0, text.index("\0")) + 1, "has a zero byte; check the path")
    return text.replace("\r\n", "\n")


# Read JSON, YAML and TOML into settings with lines.


_TABLE = re.compile(r"^\s*\[\s*([\w.\- ]+?)\s*\]\s*(?:#.*)?$")
_TABLE_OF_LIST = re.compile(r"^\s*\[\[")
_TOML_KEY = re.compile(r"^\s*([\w.\-]+)\s*=")
_JSON_KEY = re.compile(r'^\s*"([^"]+)"\s*:')


def read_json(path: str, text: str) -> Document:
    """Read a JSON object."""
    try:
        value = strict_json.loads(text)
    except strict_json.StrictJsonError as error:
        line = re.search(r"line (\d+)", str(error))
        fail(path, int(line[1]) if line else 1, f"{error}; correct it")
    _check_object(path, value)
    lines = dict[str, int]()
    for number, row in enumerate(text.splitlines(), 1):
        if key := _JSON_KEY.match(row):
            lines.setdefault(key[1], number)
    return Document(path, "json", by_key(flatten(value, lines)))


def read_toml(path: str, text: str) -> Document:
    """Read a TOML document. Lists of tables are one setting each."""
    try:
        value = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        fail(path, int(line[1]) if line else text.rstrip().count("\n") + 1, f"not TOML ({error}); correct it")
    lines, table = dict[str, int](), ""
    for number, row in enumerate(text.splitlines(), 1):
        if found := _TABLE.match(row):
            table = found[1].replace(" ", "") + "."
        elif _TABLE_OF_LIST.match(row):
            table = "[]."
        elif key := _TOML_KEY.match(row):
            lines.setdefault(table + key[1], number)
    return Document(path, "toml", by_key(flatten(value, lines)))


def read_yaml(path: str, text: str) -> Document:
    """Read one YAML document. No tag runs code: values are scalars, lists and objects."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        settings = [] if node is None else _leaves(path, node, "", 0)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        fail(path, mark.line + 1 if mark else None, f"not YAML ({error.problem or error.context}); correct it")
    except (yaml.YAMLError, RecursionError) as error:
        fail(path, None, f"not YAML ({error}); correct it")
    if not settings:
        fail(path, 1, "has no settings; it must be an object of names and values")
    return Document(path, "yaml", by_key(settings))


def _leaves(path: str, node: yaml.Node, prefix: str, depth: int) -> list[Setting]:
    if not isinstance(node, yaml.MappingNode):
        fail(path, node.start_mark.line + 1, "is no object of names and values; give one")
    if depth > strict_json.MAX_DEPTH:
        fail(path, node.start_mark.line + 1, f"is nested more than {strict_json.MAX_DEPTH} levels deep")
    settings: list[Setting] = []
    for name, part in node.value:
        key, line = f"{prefix}{getattr(name, 'value', '?')}", name.start_mark.line + 1
        if isinstance(part, yaml.MappingNode) and part.value:
            settings += _leaves(path, part, f"{key}.", depth + 1)
            if len(settings) > 100_000:  # aliases can multiply an object without end
                fail(path, line, "has more than 100000 settings")
        else:
            settings.append(Setting(key, _plain(path, part, line), line))
    return settings


def _plain(path: str, node: yaml.Node, line: int) -> Any:
    if isinstance(node, yaml.SequenceNode):
        items = [item.value if isinstance(item, yaml.ScalarNode) else "{…}" for item in node.value]
        return Expression(f"[{', '.join(items)}]") if any("${" in item for item in items) else items
    if isinstance(node, yaml.MappingNode):
        return {}
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        fail(path, line, f"the value {node.value!r} cannot be read; write a number, a text or a list")
    return Expression(value) if isinstance(value, str) and "${" in value else value


def scalar(text: str) -> Any:
    """Read one value as YAML does; text that is no YAML stays text."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if isinstance(value, str | int | float | bool | list) or value is None:
        return Expression(text) if "${" in text else value
    return text


def _check_object(path: str, value: Any) -> None:
    if not isinstance(value, dict) or not value:
        fail(path, 1, "is no object of names and values; give one")


# Read the keyword arguments of a configuration's call, and of its trainer's, in Python source, which is never run.


CALLS = ("GRPOConfig",)
TRAINERS = ("GRPOTrainer",)
OF_THE_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # in its order


def read_python(path: str, text: str) -> Document:
    """Read the arguments of the one call of ``GRPOConfig`` in the source, and the model and data of ``GRPOTrainer``.

    Constants that are assigned once, at the top level of the file, are followed. Other expressions are not evaluated.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        fail(path, error.lineno, f"not Python ({error.msg}); correct it")
    except (ValueError, RecursionError, MemoryError) as error:
        fail(path, None, f"not Python ({error or 'nested too deep'}); correct it")
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node.func) in CALLS]
    if len(calls) != 1:
        lines = ", ".join(str(call.lineno) for call in calls)
        where = f"{len(calls)} calls of {CALLS[0]} (lines {lines})" if calls else f"no call of {CALLS[0]}(…)"
        fail(path, calls[1].lineno if calls else 1, f"{where}; give a file with one")
    constants = _constants(tree)
    call = calls[0]
    settings = [Setting(f"argument {n}", Expression(ast.unparse(a)), a.lineno) for n, a in enumerate(call.args, 1)]
    for keyword in call.keywords:
        name = keyword.arg or f"**{ast.unparse(keyword.value)}"
        settings.append(Setting(name, _value(keyword.value, constants), keyword.value.lineno))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in TRAINERS:
            given = [*zip(OF_THE_TRAINER, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            for argument, value in given:
                if argument in OF_THE_TRAINER and argument != "args":  # those are the configuration
                    settings.append(Setting(argument, _value(value, constants), value.lineno))
    return Document(path, "python", by_key(settings))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    assigned = dict[str, list[ast.expr]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            assigned.setdefault(node.id, [])
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    assigned[target.id].append(statement.value)
    stored = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]  # of a function, which may hide it
    return {name: values[0] for name, values in assigned.items() if len(values) == 1 and stored.count(name) == 1}


def _value(node: ast.expr, constants: dict[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return Expression(ast.unparse(node))


# How many values the flags of a command line take.


_KINDS = {"switch": 0, "value": 1, "list": math.inf}


def most_values(flag: str) -> float | None:
    """Return how many values ``flag`` takes at most: 0 for a switch, and None if that is not known."""
    return _counts().get(flag)


@cache
def _counts() -> dict[str, float]:
    fields = [*MODEL_FLAGS]
    with suppress(ValueError):  # megatron-core is not installed
        fields += megatron_fields().values()
    counts = {each.flag: math.inf if each.is_list else float(each.kind != "bool") for each in fields}
    counts |= {row.flag: _KINDS[row.kind] for row in FOREIGN_FLAGS.values() if row.kind in _KINDS}
    for action in build_parser()._actions:
        most = 1 if action.nargs is None else 0 if action.nargs == 0 else math.inf
        counts |= dict.fromkeys(action.option_strings, most)
    earlier = openrlhf_underscores.EARLIER
    switches = {key for key, row in (openrlhf.ROWS | openrlhf_underscores.ROWS).items() if row.kind == "switch"}
    return counts | dict.fromkeys([*switches, *(earlier[key] for key in switches if key in earlier)], 0)


# Split a shell script into words and separators, as a shell does before it expands anything.
#
# ``shlex`` is not enough: to it every ``#`` begins a comment, as in ``${MODEL##*/}``, and the brackets of ``$(date)``
# end
# the command.


_SEPARATORS = "\n;&|()"
_PLAIN = re.compile(r"[^\s\\'\"`$;&|()]+")
_DOCUMENT = re.compile(r"\d?<<(?!<)-?")  # the beginning of a here-document
_PLAIN_IN_QUOTES = re.compile(r"[^\\\"`$]+")


@dataclass(frozen=True)
class Word:
    """Hold a word without its quotes, or one character that separates words.

    Attributes:
        text: The word, with expansions (``$NAME``, ``$(command)``) as they are written.
        line: The line that it begins on.
        is_quoted: Whether a part of it is in quotes, or it comes from a variable: ``<`` is no redirection there.
        separates: Whether it ends a command, or opens or closes a list.
    """

    text: str
    line: int
    is_quoted: bool = False
    separates: bool = False


def words_of(path: str, text: str, reads_documents: bool) -> Iterator[Word]:
    """Yield the words of ``text`` without its comments, and with those of here-documents if asked to.

    Raises:
        InputError: A quote or a bracket is not closed. The message has ``path`` and the line.
    """
    return _Scanner(path, text, reads_documents).words()


class _Scanner:
    def __init__(self, path: str, text: str, reads_documents: bool) -> None:
        self._path = path
        self._text = text
        self._reads_documents = reads_documents
        self._document_ends: list[str] = []  # of the here-documents that begin with the next line
        self._expects_end = False  # whether the next word is one
        self._at = 0  # the next character
        self._newlines = [match.start() for match in re.finditer("\n", text)]

    def _line(self, at: int) -> int:
        return bisect_left(self._newlines, at) + 1

    def words(self) -> Iterator[Word]:
        text = self._text
        while self._at < len(text):
            char = text[self._at]
            if char == "#":  # at the beginning of a word; a backslash at the end continues no comment
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            elif text.startswith("\\\n", self._at):
                self._at += 2
            elif char in _SEPARATORS and not text.startswith("&>", self._at):
                yield Word(char, self._line(self._at), separates=True)
                self._at += 1
                if char == "\n":
                    self._leave_out_documents()
            elif char.isspace():
                self._at += 1
            else:
                begin = self._at
                word = self._word()
                self._note_document(begin, word)
                yield word

    def _note_document(self, begin: int, word: Word) -> None:
        if self._reads_documents:
            return
        opening = _DOCUMENT.match(self._text, begin)
        if self._expects_end or opening:
            end = word.text if opening is None else word.text[len(opening[0]) :]
            self._document_ends += [end] if end else []
            self._expects_end = not end

    def _leave_out_documents(self) -> None:
        ends, self._document_ends = self._document_ends, []
        for end in ends:
            if line := re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self._text, self._at):
                self._at = line.end()

    def _word(self) -> Word:
        text, line = self._text, self._line(self._at)
        parts: list[str] = []
        is_quoted = False
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN.match(text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char == "\\":
                parts.append(text[self._at + 1 : self._at + 2].replace("\n", ""))
                self._at += 2
            elif char == "'":
                end = self._end("'", self._at + 1)
                parts.append(text[self._at + 1 : end])
                self._at, is_quoted = end + 1, True
            elif char == '"':
                parts.append(self._in_quotes())
                is_quoted = True
            elif char in "$`":
                parts.append(self._expansion())
            elif char == "&" and (text.startswith("&>", self._at) if not parts else parts[-1][-1:] in ("<", ">")):
                parts.append(char)  # of a redirection
                self._at += 1
            else:
                break
        return Word("".join(parts), line, is_quoted)

    def _in_quotes(self) -> str:
        """Read on to the end of double quotes; return what is in them."""
        text, begin = self._text, self._at
        parts: list[str] = []
        self._at += 1
        while self._at < len(text):
            char = text[self._at]
            if plain := _PLAIN_IN_QUOTES.match(text, self._at):
                parts.append(plain[0])
                self._at = plain.end()
            elif char == '"':
                self._at += 1
                return "".join(parts)
            elif char == "\\":
                escaped = text[self._at + 1 : self._at + 2]
                parts.append("" if escaped == "\n" else escaped if escaped in ('"', "\\") else char + escaped)
                self._at += 2
            else:
                parts.append(self._expansion())
        self._fail('"', begin)

    def _expansion(self) -> str:
        """Read on to the end of an expansion, or past a dollar sign; return it as it is written."""
        begin = self._at
        if self._text[begin] == "`":
            end = self._end("`", begin + 1)
        elif self._text.startswith("$(", begin):
            end = self._matching("(", ")", begin + 2)
        elif self._text.startswith("${", begin):
            end = self._matching("{", "}", begin + 2)
        else:
            end = begin
        self._at = end + 1
        return self._text[begin : self._at]

    def _end(self, quote: str, at: int) -> int:
        end = self._text.find(quote, at)
        if end < 0:
            self._fail(quote, at - 1)
        return end

    def _matching(self, opening: str, closing: str, at: int) -> int:
        """Return the place of the bracket that closes the one before ``at``."""
        text, begin, depth = self._text, at, 1
        while at < len(text):
            char = text[at]
            if char == "'" and opening == "(":
                at = self._end("'", at + 1)
            elif char == '"':
                before, self._at = self._at, at
                self._in_quotes()
                at, self._at = self._at - 1, before
            elif char == "\\":
                at += 1
            elif char in (opening, closing):
                depth += 1 if char == opening else -1
                if not depth:
                    return at
            at += 1
        self._fail(opening, begin - 1)

    def _fail(self, opening: str, at: int) -> NoReturn:
        fail(self._path, self._line(at), f"not a shell script ({opening} is not closed); check its quotes")


# Read the training command of a shell script: its words, with the script's own variables and arrays filled in.
#
# Nothing is run. A variable that the script does not set, or sets in a branch or a loop, and a command substitution
# stay
# as they are written. A file beside the script that it sources is read for its variables and arrays too.


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


# Choose the reader of a file by its suffix.


PACKAGED = ("ppo_trainer", "ppo_megatron_trainer")  # verl's own, whose defaults the table has

READERS = {
    ".json": read_json,
    ".yaml": read_yaml,
    ".yml": read_yaml,
    ".toml": read_toml,
    ".py": read_python,
    ".sh": read_shell,
    ".bash": read_shell,
}


def read_document(path: str) -> Document:
    """Read a file of settings.

    Raises:
        InputError: The file cannot be read, or is not what its suffix says: one sentence with file and line.
    """
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path):
        fail(path, None, f"is a folder; give a file in it that ends in {', '.join(READERS)}")
    if not os.path.exists(path):
        fail(path, None, "no such file; check the path")
    if suffix not in READERS:
        fail(path, None, f"the suffix {suffix!r} is not known; give a file that ends in {', '.join(READERS)}")
    document = READERS[suffix](path, read_text(path))
    names_another = document.kind == "shell" and "--config-name" in document.settings
    return _with_config(document) if names_another else document


def _with_config(document: Document) -> Document:
    """Return a command of Hydra with the settings of the file that it names; overrides in the command win."""
    named = document.settings["--config-name"]
    name = str(named.value).removesuffix(".yaml")
    if name in PACKAGED:
        return document
    place = document.settings.get("--config-path")
    folder = "." if place is None else str(place.value)
    found = (base / folder / f"{name}.yaml" for base in (Path(document.path).parent, Path()))
    file = next((path for path in found if os.path.isfile(path)), None)  # false for a name that no file can have
    if file is None:
        document.fail(
            named.line,
            f"--config-name {name}: there is no {Path(folder) / name}.yaml, whose settings the command overrides; give "
            "its folder as --config-path, or drop --config-name to start from the defaults of verl",
        )
    below = {key: replace(each, line=None) for key, each in read_document(str(file)).settings.items()}
    return replace(document, settings={**below, **document.settings})
