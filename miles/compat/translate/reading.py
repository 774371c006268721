"""Read a file of settings in any of its formats, with the files that it inherits from."""

import ast
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from miles.base import strict_json
from miles.base.shell_text import Script, Word, read_script
from miles.base.text import InputError
from miles.compat.translate.translation import Document, Expression, Setting, by_key, fail, flatten, parts_of, table_of
from miles.compat.verdicts import FOREIGN_FLAGS
from miles.config.megatron.fields import installed_fields
from miles.config.parser import build_parser

LARGEST_FILE = 1_000_000  # bytes
MOST_NODES = 1000  # of a YAML list


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


_NOT_YAML = (yaml.YAMLError, ValueError, IndexError)  # PyYAML raises the last one for "!!int +"
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
    if not isinstance(value, dict) or not value:
        fail(path, 1, "is no object of names and values; give one")
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
    lines = dict[str, int]()
    table = ""
    for number, row in enumerate(text.splitlines(), 1):
        if match := _TABLE.match(row):
            table = match[1].replace(" ", "") + "."
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
    yaml.SafeLoader("").flatten_mapping(node)  # <<: *anchor
    pairs = {str(getattr(name, "value", "?")): (name, part) for name, part in node.value}  # the last of a name counts
    for text, (name, part) in pairs.items():
        key = f"{prefix}{text}"
        line = name.start_mark.line + 1
        if isinstance(part, yaml.MappingNode) and part.value:
            settings += _leaves(path, part, f"{key}.", depth + 1)
            if len(settings) > 100_000:  # aliases can multiply an object without end
                fail(path, line, "has more than 100000 settings")
        else:
            settings.append(Setting(key, _plain(path, part, line), line))
    return settings


def _plain(path: str, node: yaml.Node, line: int) -> Any:
    if isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            items = [_plain(path, item, line) for item in node.value]
            is_computed = any(isinstance(item, Expression) for item in items)
            return Expression(f"[{', '.join(map(str, items))}]") if is_computed else items
        if sum(1 for _ in itertools.islice(_nodes(node), MOST_NODES)) >= MOST_NODES:
            return ["{…}"]
    if isinstance(node, yaml.MappingNode):
        return {}
    try:
        value = yaml.SafeLoader("").construct_object(node, deep=True)
    except _NOT_YAML:
        fail(path, line, f"the value {node.value!r} cannot be read; write a number, a text or a list")
    return Expression(value) if isinstance(value, str) and "${" in value else value


def _nodes(node: yaml.Node) -> Iterator[yaml.Node]:
    """Yield a node and those within it; aliases can multiply them."""
    yield node
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item)
    elif isinstance(node, yaml.MappingNode):
        for _, item in node.value:
            yield from _nodes(item)


def scalar(text: str) -> Any:
    """Read one value as YAML does; text that is no YAML stays text."""
    try:
        value = yaml.safe_load(text)
    except (*_NOT_YAML, RecursionError):
        return text
    if isinstance(value, str | int | float | bool | list) or value is None:
        return Expression(text) if "${" in text else value
    return text


# Read the keyword arguments of a configuration's call, and of its trainer's, in Python source, which is never run.


CALL, TRAINER = "GRPOConfig", "GRPOTrainer"
_OTHER_TRAINERS = re.compile(
    r"(SFT|DPO|OnlineDPO|KTO|ORPO|CPO|Reward|PRM|BCO|XPO|NashMD|A2PO|TPO|RLOO|PPO|GKD|GOLD|MiniLLM|SDFT|SDPO|IWOPD"
    r"|\w*Distillation)(Config|Trainer)$"
)
OF_THE_TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")  # in its order
# The arguments of peft's LoraConfig by their names in TRL's ModelConfig, with peft's defaults.
ADAPTER: dict[str, tuple[str, float | None]] = {
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "target_modules": ("lora_target_modules", None),
}


def read_python(path: str, text: str) -> Document:
    """Read the arguments of the one call of ``GRPOConfig`` in the source, and those of ``GRPOTrainer``.

    Without a configuration the trainer has its defaults. Constants that are assigned once, at the top level of the
    file, are followed. Other expressions are not evaluated. Subclasses count, and so does what is assigned to an
    attribute of the configuration later.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        fail(path, error.lineno, f"not Python ({error.msg}); correct it")
    except (ValueError, RecursionError, MemoryError) as error:
        fail(path, None, f"not Python ({error or 'nested too deep'}); correct it")
    every = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    configs = _subclasses(tree, CALL)
    calls = [call for call in every if _name(call.func) in configs]
    trainers = [call for call in every if re.search(rf"{TRAINER}$", _name(call.func))]
    trainers += [call for call in every if _name(call.func) in _subclasses(tree, TRAINER) and call not in trainers]
    others = tuple(name for call in every if _OTHER_TRAINERS.match(name := _name(call.func)))
    if any(_name(call.func) == "TrlParser" for call in every) and not calls:
        fail(
            path,
            1,
            "its settings are the arguments of its command; give a shell script with the command, or the file "
            "of its --config",
        )
    if others and not (calls or trainers):
        return Document(path, "python", words=others)
    if len(calls) > 1 or not (calls or trainers):
        lines = ", ".join(str(call.lineno) for call in calls)
        where = f"{len(calls)} calls of {CALL} (lines {lines})" if calls else f"no call of {CALL}(…)"
        fail(path, calls[1].lineno if calls else 1, f"{where}; give a file with one")
    constants = _constants(tree)
    settings = list[Setting]()
    for call in calls:
        settings += [
            Setting(statement.target.id, _value(statement.value, constants), statement.lineno)
            for statement in configs[_name(call.func)]
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value
        ]
        settings += [Setting(f"argument {n}", Expression(ast.unparse(a)), a.lineno) for n, a in enumerate(call.args, 1)]
        for keyword in call.keywords:
            name = keyword.arg or f"**{ast.unparse(keyword.value)}"
            settings.append(Setting(name, _value(keyword.value, constants), keyword.value.lineno))
    settings += _assigned_later(tree, calls, constants)
    for call in trainers:
        if _name(call.func) != TRAINER:
            what = f"another trainer than {TRAINER}: what it changes was not read"
            settings.append(Setting(_name(call.func), what, call.lineno))
        arguments = [*zip(OF_THE_TRAINER, call.args, strict=False), *((each.arg, each.value) for each in call.keywords)]
        for argument, value in arguments:
            if argument == "peft_config":
                settings += _adapter(value, constants)
            elif argument == "args":
                if not calls and (text := ast.unparse(value)) != "None":
                    fail(path, value.lineno, f"args = {text} is no call of {CALL}(…); give a file with one")
            else:
                key = argument or f"**{ast.unparse(value)}"
                settings.append(Setting(key, _value(value, constants), value.lineno))
    return Document(path, "python", by_key(settings))


def _subclasses(tree: ast.Module, base: str) -> dict[str, list[ast.stmt]]:
    """Return the names of a class and of its subclasses in the source, with their bodies."""
    bodies = dict[str, list[ast.stmt]]({base: []})
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(_name(each) in bodies for each in node.bases):
            bodies[node.name] = node.body
    return bodies


def _assigned_later(tree: ast.Module, calls: Sequence[ast.Call], constants: dict[str, ast.expr]) -> Iterator[Setting]:
    """Yield what is assigned to attributes of the configuration; it is not known if a branch or a loop assigns it."""
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    bodies += [node.body for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    always = [statement for body in bodies for statement in body]
    nodes = [each for each in ast.walk(tree) if isinstance(each, ast.Assign | ast.AugAssign | ast.AnnAssign)]
    pairs = [
        (node, each) for node in nodes for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    owners = {ast.unparse(target) for node, target in pairs if node.value in calls}
    for node, target in pairs:
        owner, _, name = ast.unparse(target).rpartition(".")
        if node.value is not None and (owner in owners or owner.endswith(".args")):
            is_known = not isinstance(node, ast.AugAssign) and node in always and owner in owners
            value = _value(node.value, constants) if is_known else Expression(ast.unparse(node))
            yield Setting(name, value, node.lineno)


def _adapter(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[Setting]:
    """Yield the settings of a ``LoraConfig`` as those of TRL's command line; another value is one setting."""
    config = constants.get(node.id, node) if isinstance(node, ast.Name) else node
    if not isinstance(config, ast.Call) or _name(config.func) != "LoraConfig" or config.args:
        yield Setting("peft_config", _value(node, constants), node.lineno)
        return
    arguments = {each.arg: each.value for each in config.keywords}
    yield Setting("use_peft", True, node.lineno)
    for argument, (name, default) in ADAPTER.items():
        value = _value(arguments.pop(argument), constants) if argument in arguments else default
        yield Setting(name, value, node.lineno)
    for key, left in arguments.items():
        yield Setting(f"peft_config.{key}", _value(left, constants), left.lineno)


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
    if isinstance(node, ast.Call) and _name(node.func) == "load_dataset" and len(node.args) == 1:
        keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
        if keywords in ({}, {"split": "'train'"}):
            node = node.args[0]
    if isinstance(node, ast.Call) and _name(node.func) == "dict" and not node.args:
        node = ast.Dict([ast.Constant(each.arg) for each in node.keywords], [each.value for each in node.keywords])
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
    counts = {each.flag: math.inf if each.is_list else float(each.kind != "bool") for each in installed_fields()}
    counts |= {row.flag: _KINDS[row.kind] for row in FOREIGN_FLAGS.values() if row.kind in _KINDS}
    for action in build_parser()._actions:
        most = 1 if action.nargs is None else 0 if action.nargs == 0 else math.inf
        counts |= dict.fromkeys(action.option_strings, most)
    tables = (table_of("openrlhf"), table_of("openrlhf_underscores"))
    kinds = {bool: 0.0, list: math.inf}
    for table in tables:
        for key, row in table.rows.items():
            now = tables[0].rows.get(row.now, row)
            counts[key] = 0.0 if now.kind == "switch" else kinds.get(type(row.default), 1.0)
    return counts


# Read the training command of a shell script: its words, with the script's own variables and arrays filled in.
#
# Nothing is run. A file alongside the script that it sources is read for its variables and arrays too.


# The contents of the words of a training command, and how its settings are written. The later ones are no RL, or a
# script whose flags are TRL's.
_METHODS = "sft|dpo|kto|orpo|reward|rloo|ppo|cpo|bco|xpo|nash_md|prm|gkd|gold|minillm|sdft|sdpo|distillation"
COMMANDS = (
    (re.compile(r"main_ppo|main_dapo|main_spin|main_prime"), "overrides"),
    (re.compile(r"^openrlhf\.cli\.|train_ppo_ray"), "flags"),
    (re.compile(r"(^|/)train(_async)?\.py$"), "flags"),
    (re.compile(r"^verl\.|(^|/)(main_\w+|fsdp_sft_trainer)\.py$"), "overrides"),
    (
        re.compile(rf"(^|/)\w*(g[rs]po|{_METHODS})\w*\.py$|^(grpo|{_METHODS})$"),
        "trl",
    ),
    (re.compile(r"^\+{0,2}actor_rollout_ref\."), "settings"),  # of a program that is built on verl
)
HYDRA_FLAGS = {"--config-path": "--config-path", "-cp": "--config-path", "--config-name": "--config-name"}
HYDRA_FLAGS |= {"-cn": "--config-name", "--config-dir": "--config-path", "--config": "--config"}
_HOME = {"HOME": "~"}  # the shell of the reader has another one than the shell that runs the command

_OVERRIDE = re.compile(r"^(\+{0,2})([A-Za-z_][\w.\-/@]*)=(.*)$", re.DOTALL)
_NUMBER = re.compile(r"^-\.?\d")
_EXPANSION = re.compile(r"\$(?:[@*]|\w+|\{[^{}]*\})")  # a word that is one variable
_ALL_WORDS = re.compile(r"\$(?:[@*]|\{(?:[@*]|\w+\[[@*]\]).*\})")  # all words of an array, or of the script
_HOLDS_FLAGS = re.compile(r"\$\{?\w*(?:args|flags|opts|options|overrides)\b", re.IGNORECASE)


@dataclass
class _Sources:
    """Read the files that a script sources, and note those that are not there."""

    folder: Path
    not_read: list[str] = field(default_factory=list)
    seen: set[Path] = field(default_factory=set)

    def text(self, name: str) -> str | None:
        """Return the text of a file alongside the script, or ``None``."""
        relative = Path(_FIRST_FOLDER.sub("", name))
        file = next((base / relative for base in (self.folder, Path()) if os.path.isfile(base / relative)), None)
        if relative.is_absolute() or file is None:
            self.not_read.append(str(relative))
        elif (target := file.resolve()) not in self.seen:
            self.seen.add(target)
            try:
                return read_text(str(file))
            except InputError:
                self.not_read.append(str(relative))
        return None


def read_shell(path: str, text: str) -> Document:
    """Read the last training command of a script; one in a here-document only if there is no other."""
    sources = _Sources(Path(path).parent)
    script = _script(path, text, sources)
    inner = [word.text for command in script.commands for word in command if _is_command(word)]  # bash -c "..."
    documents = [_script(path, body, sources) for body in (*script.documents, *inner)]
    for pattern, style in COMMANDS:
        for commands in (script.commands, *(each.commands for each in documents)):
            starts = [(command, _begin(command, pattern, style)) for command in commands]
            if fitting := [(command, place) for command, place in starts if place is not None]:
                return _training(path, script, sources, fitting, style)
    if script.fault_line is not None:
        fail(path, script.fault_line, "not a shell script (a quote or a bracket is not closed); check its quotes")
    fail(path, 1, "has no training command (verl's main_ppo, openrlhf.cli.train_ppo_ray, train.py); check the file")


def _script(path: str, text: str, sources: _Sources) -> Script:
    try:
        return read_script(text, source=sources.text, environment=_HOME)
    except ValueError as error:
        fail(path, 1, str(error))


def _begin(command: list[Word], pattern: re.Pattern[str], style: str) -> int | None:
    """Return where the settings of a training command begin, or ``None`` if it is none."""
    starts = [n for n, word in enumerate(command) if pattern.search(word.text) and not _is_command(word)]
    if not starts or style != "settings":
        return starts[0] + 1 if starts else None
    return next((n for n, w in enumerate(command) if _OVERRIDE.match(w.text) or (n and not w.is_known)), None)


def _is_command(word: Word) -> bool:
    return " " in word.text and any(pattern.search(word.text) for pattern, style in COMMANDS if style != "settings")


def _training(
    path: str, script: Script, sources: _Sources, fitting: list[tuple[list[Word], int]], style: str
) -> Document:
    command, place = fitting[-1]
    rest = command[place:]
    words = tuple(word.text for word in command)
    if style == "trl" and any("." in word.text.partition("=")[0] and _OVERRIDE.match(word.text) for word in rest):
        style = "overrides"  # NeMo-RL's programs have such names too
    settings, elsewhere = _overrides(rest) if style in ("overrides", "settings") else _flags(rest)
    if style == "settings":  # a variable may hold the program with further settings
        elsewhere = [word for word in command[:place] if _EXPANSION.fullmatch(word.text)] + elsewhere
    others = [_set_elsewhere(word, script, sources) for word in elsewhere]
    if len(fitting) > 1:
        lines = ", ".join(str(each[0].line) for each, _ in fitting)
        others.append(
            Setting(f"{len(fitting)} commands", f"train here (lines {lines}): the last one is translated", None)
        )
    if style == "trl":  # TRL's flags are the names of its settings
        settings = [replace(each, key=each.key.removeprefix("--").replace("-", "_")) for each in settings]
        settings = [replace(each, key="--config") if each.key == "config" else each for each in settings]
        settings = [*_processes(path, words), *settings]
    return Document(path, "shell", by_key(settings), words, by_key(others))


def _processes(path: str, words: Sequence[str]) -> list[Setting]:
    """Return the number of processes in the file of ``accelerate launch --config_file``, if the file is there."""
    match = re.search(r" --config[-_]file[= ](\S+)", " ".join(words))
    file = _alongside(path, match[1]) if match else None
    settings = {} if file is None else read_yaml(file, read_text(file)).settings
    return [each for each in settings.values() if each.key == "num_processes"]


def _alongside(path: str, name: str, above: int = 5) -> str | None:
    """Return a file that is named in ``path``: in its folder, up to ``above`` folders above it, or the current one."""
    relative, here = _FIRST_FOLDER.sub("", name), Path(path).resolve()
    bases = [*here.parents[: above + 1], Path()]
    return next((str(base / relative) for base in bases if os.path.isfile(base / relative)), None)


def _set_elsewhere(word: Word, script: Script, sources: _Sources) -> Setting:
    """Describe the source of the flags that an expansion stands for."""
    name = word.text.strip("${}")
    if name.startswith(("@", "*")) or name.isdigit():
        where = "is what the script is called with: give those flags too"
    elif name.partition("[")[0] in script.uncertain:
        where = "is set in a branch or a loop of the script: give the flags that hold for you too"
    elif sources.not_read:
        where = f"is set elsewhere (source {' or '.join(sources.not_read)}): give that file's flags too"
    else:
        where = "is not set in this file: give its flags too"
    return Setting(word.text, where, word.line)


def _overrides(words: Sequence[Word]) -> tuple[list[Setting], list[Word]]:
    """Read Hydra's ``key=value``, and which file of settings it names. Other words are listed on their own.

    The second result are the words that expand to settings which are not known.
    """
    settings: list[Setting] = []
    elsewhere: list[Word] = []
    for word, before in zip(words, [None, *words], strict=False):
        flag, equals, value = word.text.partition("=")
        if match := _OVERRIDE.match(word.text):
            settings += parts_of(Setting(match[2], _hydra_value(match[3], word.is_known), word.line))
        elif flag in HYDRA_FLAGS and equals:
            settings.append(Setting(HYDRA_FLAGS[flag], value, word.line))
        elif before is not None and before.text in HYDRA_FLAGS:
            settings.append(Setting(HYDRA_FLAGS[before.text], word.text, before.line))
        elif not word.is_known and _EXPANSION.fullmatch(word.text):
            elsewhere.append(word)
        elif word.text and word.text not in HYDRA_FLAGS:
            settings.append(Setting(word.text, True, word.line))
    return settings, elsewhere


_COLON = re.compile(r"""("[^"]*"|'[^']*')|:(?=\S)""")  # outside of quotes; YAML wants a blank after it


def _hydra_value(text: str, is_known: bool) -> object:
    """Read a value of Hydra's command line, where an object may be ``{a:1,b:2}``."""
    if is_known and text.startswith("{"):
        with suppress(*_NOT_YAML):
            return yaml.safe_load(_COLON.sub(lambda match: match[1] or ": ", text))
    return _text(text, is_known, as_yaml=True)


def _flags(words: Sequence[Word]) -> tuple[list[Setting], list[Word]]:
    """Read ``--flag``, ``--flag value``, ``--flag=value`` and ``--flag a b``.

    The second result are the words that expand to flags which are not known.
    """
    settings: list[Setting] = []
    elsewhere: list[Word] = []
    for word in words:
        if word.text.startswith("-") and not _NUMBER.match(word.text) and word.text != "--":
            flag, equals, value = word.text.partition("=")
            settings.append(Setting(flag, _text(value, word.is_known) if equals else True, word.line))
        elif _EXPANSION.fullmatch(word.text) and not (settings and _takes(settings[-1], word.text)):
            elsewhere.append(word)
        elif not word.text and not (settings and _takes(settings[-1], word.text)):
            continue  # a variable that is set to nothing
        elif not settings:
            settings.append(Setting(word.text, True, word.line))
        else:
            settings[-1] = Setting(settings[-1].key, _added(settings[-1].value, word), settings[-1].line)
    return settings, elsewhere


def _takes(last: Setting, text: str) -> bool:
    """Return whether an expansion is a value of the flag before it, and not separate flags."""
    most = most_values(last.key)
    is_all_words = _ALL_WORDS.fullmatch(text) is not None
    if last.value is not True:
        count = len(last.value) if isinstance(last.value, list) else 1
        return most is not None and count < most and not is_all_words and not _HOLDS_FLAGS.match(text)
    if most is None:
        return not is_all_words and not _HOLDS_FLAGS.match(text)
    return most > 0


def _added(before: object, word: Word) -> object:
    """Add a word to the values of a flag. All of them together are an expression if one of them is."""
    value = _text(word.text, word.is_known)
    if before is True:
        return value
    values = [*(before if isinstance(before, list) else [before]), value]
    if any(isinstance(each, Expression) for each in values):
        return Expression(" ".join(map(str, values)))
    return values


def _text(text: str, is_known: bool, as_yaml: bool = False) -> object:
    if not is_known and ("$" in text or "`" in text):
        return Expression(text)
    return scalar(text) if as_yaml else text


# Choose the reader of a file by its suffix, and read the files that it inherits from.


PACKAGED = ("ppo_trainer", "ppo_megatron_trainer")  # verl's own, whose defaults the table has
NAMES_A_FILE = ("--config-name", "--config")
MOST_PARENTS = 20
_FIRST_FOLDER = re.compile(r"^(?:\$(?:\{?\w+\}?|\(.*?\))/)+")  # $(pwd)/ and the like: a folder above the script
_REFERENCE = re.compile(r"\$\{(?:(mul|div|sub|add|oc\.select):)?([^${}:]+)\}")

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
    """Read a file of settings, with the settings of the files that it inherits from.

    Raises:
        InputError: The file or a parent cannot be read: one sentence with file and line.
    """
    return _interpolated(_read_document(path, 0))


def _read_document(path: str, depth: int) -> Document:
    suffix = Path(path).suffix.lower()
    if os.path.isdir(path):
        fail(path, None, f"is a folder; give a file in it that ends in {', '.join(READERS)}")
    if not os.path.exists(path):
        fail(path, None, "no such file; check the path")
    if suffix not in READERS:
        fail(path, None, f"the suffix {suffix!r} is not known; give a file that ends in {', '.join(READERS)}")
    if depth > MOST_PARENTS:
        fail(path, None, f"inherits from more than {MOST_PARENTS} files; check that they do not name each other")
    document = READERS[suffix](path, read_text(path))
    for setting, name, folder in _parents(document):
        document = _with_parent(document, setting, name, folder, depth)
    return document


def _parents(document: Document) -> Iterator[tuple[Setting, str, str]]:
    """Yield what names a parent, the name of its file and its folder, the most specific first."""
    settings = document.settings
    if document.kind == "shell":
        folder = settings.get("--config-path", Setting("", "", None)).value
        for key in NAMES_A_FILE:
            if key in settings and str(settings[key].value).removesuffix(".yaml") not in PACKAGED:
                name = str(settings[key].value)
                yield settings[key], name if Path(name).suffix in READERS else f"{name}.yaml", str(folder)
    elif document.kind == "yaml" and "defaults" in settings:
        value = settings["defaults"].value
        for name in reversed(value if isinstance(value, list) else [value]):
            if isinstance(name, str) and name not in PACKAGED and name not in ("_self_", "{…}"):
                yield settings["defaults"], name if Path(name).suffix in READERS else f"{name}.yaml", ""


def _with_parent(document: Document, setting: Setting, name: str, folder: str, depth: int) -> Document:
    """Return a document with the settings of a file that it names below its own."""
    relative = os.path.join(_FIRST_FOLDER.sub("", folder), _FIRST_FOLDER.sub("", name))
    file = _alongside(document.path, relative, 5 if document.kind == "shell" else 0)
    if file is None or "$" in relative:
        document.fail(
            setting.line,
            f"{setting.label}: the settings that are not written here are those of {relative}, which is not there: put "
            "it alongside this file, or give a file that is whole",
        )
    parent = _read_document(file, depth + 1).settings
    replaced = tuple(f"{key.removesuffix('._override_')}." for key in document.settings)
    below = {key: replace(each, line=None) for key, each in parent.items() if not key.startswith(replaced)}
    return replace(document, settings={**below, **document.settings})


def _interpolated(document: Document) -> Document:
    """Return a document with ``${other.key}`` and ``${mul:a,b}`` filled in, where what they name is known."""
    settings = dict(document.settings)
    for _ in range(10):  # a reference to a reference
        changed = False
        for key, setting in settings.items():
            if isinstance(setting.value, Expression) and "${" in setting.value.text and document.kind != "python":
                text = _REFERENCE.sub(lambda match, key=key: _referred(match, key, settings), setting.value.text)  # type: ignore[misc]
                if text != setting.value.text:
                    settings[key] = replace(setting, value=scalar(text))
                    changed = True
        if not changed:
            break
    return replace(document, settings=settings)


def _referred(match: re.Match[str], key: str, settings: dict[str, Setting]) -> str:
    """Return the text that a reference stands for, or the reference if that is not known."""
    values = []
    for name in (part.strip() for part in match[2].split(",")):
        level = len(name) - len(name.lstrip("."))
        parts = key.split(".")
        name = ".".join([*parts[: len(parts) - level], name.lstrip(".")]) if level else name
        if name in settings and not isinstance(settings[name].value, Expression | list | dict):
            values.append(settings[name].value)
        elif match[1] and _NUMBER.match(f"-{name}"):
            values.append(scalar(name))
        elif match[1] != "oc.select":
            return match[0]
    if match[1] in (None, "oc.select"):
        return ("null" if values[0] is None else str(values[0])) if values else match[0]
    if (
        len(values) != 2
        or not all(isinstance(value, int | float) for value in values)
        or (match[1] == "div" and not values[1])
    ):
        return match[0]
    one, other = values
    results = {"mul": one * other, "add": one + other, "sub": one - other}
    return str(results[match[1]] if match[1] in results else one / other)
