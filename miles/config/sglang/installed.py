"""Read from SGLang's source which flags its server and its router have, and which values each of them takes.

Its own parser in a child process would take 13 s of processor time for each command, stop at the first fault, and
accept what its server refuses later: a page size of 0, a share above 1, broken JSON. It is made of declarations that
can be read as written: fields of ``srt/arg_groups/fields/*.py`` annotated ``A[type, "help"]`` or ``A[type, Arg(…)]``,
and calls of ``add_argument``.

Not checked are values that the source does not tell: choices that SGLang computes when it is imported
(``--sampling-backend``, ``--reasoning-parser``, ``--tool-call-parser``, ``--kv-canary-real-data``,
``--lora-target-modules``), choices to which an installed plugin of SGLang may add, and what SGLang reads from a text or
from JSON once it has it.
"""

import ast
import json
import tomllib
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml

from miles.base.text import one_line

Reading: TypeAlias = Literal["text", "int", "float", "size", "json"]
Expressions: TypeAlias = Mapping[str, ast.expr]

# How the run treats flags of SGLang, by name; flags.toml describes each part.
TABLE: dict[str, Any] = tomllib.loads((files(__package__) / "flags.toml").read_text(encoding="utf-8"))
_READINGS: dict[str, Reading] = TABLE["readings"]
_SWITCHES = ("store_true", "store_false", "DeprecatedAction", "DeprecatedStoreTrueAction")
_NEGATED = "argparse.BooleanOptionalAction"  # --NAME, and --no-NAME
_PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")


@dataclass(frozen=True)
class Accepted:
    """Describe the words that a flag accepts.

    Attributes:
        least: The fewest words after it.
        most: The most words after it; None without a limit.
        reading: What each word is read as.
        choices: The values that it is limited to; empty if there is no limit, or it is not known.
    """

    least: int = 0
    most: int | None = None
    reading: Reading = "text"
    choices: tuple[Any, ...] = ()


_SWITCH = Accepted(0, 0)
_ANYTHING = Accepted()


@cache
def server_flags() -> Mapping[str, Accepted]:
    """Return the flags of SGLang's ``ServerArgs``; none if SGLang is not installed on this host."""
    root = _folder("sglang")
    if root is None:
        return {}
    arguments, choices = root / "srt" / "server_args.py", root / "srt" / "arg_groups" / "choices.py"
    server = _tree(arguments)
    lists = _assigned(server) | (_assigned(_tree(choices)) if choices.is_file() else {})
    flags = dict[str, Accepted]()
    for path in sorted(root.glob("srt/arg_groups/fields/[!_]*.py")):
        flags |= _of_fields(_tree(path), lists)
    return flags | _of_calls(server, lists)


@cache
def router_flags() -> Mapping[str, Accepted]:
    """Return the flags of sglang-router's ``RouterArgs``; none if the router is not installed here."""
    root = _folder("sglang_router")
    if root is None:
        return {}
    tree = _tree(root / "router_args.py")
    return _of_calls(tree, _assigned(tree))


@cache
def has_plugins() -> bool:
    """Return whether a plugin of SGLang is installed, which may add to the choices of its flags."""
    return any(entry_points(group=group) for group in _PLUGINS)


def _folder(package: str) -> Path | None:
    spec = find_spec(package)  # finds, and does not import
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the expression that is assigned to each name of a module."""
    return {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _of_fields(tree: ast.Module, lists: Expressions) -> dict[str, Accepted]:
    flags = dict[str, Accepted]()
    for node in ast.walk(tree):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        annotation = node.annotation
        if not (isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple)):
            continue
        kind, *metadata = annotation.slice.elts
        calls = [call for call in metadata if isinstance(call, ast.Call)]
        keywords = {keyword.arg: keyword.value for call in calls for keyword in call.keywords if keyword.arg}
        if "no_cli" in keywords:
            continue
        cli_name = keywords.get("cli_name")
        names = ["--" + node.target.id.replace("_", "-") if cli_name is None else ast.literal_eval(cli_name)]
        names += ast.literal_eval(keywords["aliases"]) if "aliases" in keywords else []
        flags |= _with_negation(names, keywords, _of_field(_not_none(kind), keywords, lists))
    return flags


def _of_field(kind: ast.expr, keywords: Expressions, lists: Expressions) -> Accepted:
    """Return the words that a field takes, decided in the order of SGLang's ``add_cli_args_from_dataclass``."""
    container = ast.unparse(kind.value) if isinstance(kind, ast.Subscript) else ""
    if "action" in keywords:
        return _of_action(keywords)
    if container == "Literal" and isinstance(kind, ast.Subscript):
        literals = _words(kind.slice)
        first = type(literals[0]).__name__ if literals else ""
        reading = _READINGS["int" if first == "int" else "str"]
        return Accepted(1, 1, reading, _choices(keywords, lists) or tuple(literals))
    if container.lower() == "list" and "type_parser" not in keywords and isinstance(kind, ast.Subscript):
        least, most = _counts(keywords, "+")
        reading = _READINGS.get(ast.unparse(kind.slice), "text")
        return Accepted(least, most, reading, _choices(keywords, lists))
    if ast.unparse(kind) == "bool":
        return _SWITCH
    default = ast.Name(ast.unparse(kind) if ast.unparse(kind) in ("int", "float") else "str")
    return _of_words(keywords.get("type_parser", default), keywords, lists)


def _of_calls(tree: ast.Module, lists: Expressions) -> dict[str, Accepted]:
    flags = dict[str, Accepted]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [text for text in map(_flag_text, node.args) if text.startswith("--")]
            keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
            flags |= _with_negation(names, keywords, _of_call(keywords, lists))
    return flags


def _of_call(keywords: Expressions, lists: Expressions) -> Accepted:
    if "action" in keywords and not ("nargs" in keywords or _text(keywords["action"]) in ("store", "append")):
        return _of_action(keywords)
    return _of_words(keywords.get("type", ast.Name("str")), keywords, lists)


def _of_action(keywords: Expressions) -> Accepted:
    return _SWITCH if _text(keywords["action"]) in (*_SWITCHES, _NEGATED) else _ANYTHING


def _of_words(reader: ast.expr, keywords: Expressions, lists: Expressions) -> Accepted:
    least, most = _counts(keywords, None)
    name = ast.unparse(reader)
    if name not in _READINGS:
        return Accepted(least, most)
    return Accepted(least, most, _READINGS[name], _choices(keywords, lists))


def _with_negation(names: Iterable[str], keywords: Expressions, accepted: Accepted) -> Iterator[tuple[str, Accepted]]:
    for name in names:
        yield name, accepted
        if "action" in keywords and _text(keywords["action"]) == _NEGATED:
            yield "--no-" + name.removeprefix("--"), accepted


def _counts(keywords: Expressions, default: str | None) -> tuple[int, int | None]:
    node = keywords.get("nargs")
    nargs: Any = default if node is None else node.value if isinstance(node, ast.Constant) else "*"
    match nargs:
        case None:
            return 1, 1
        case "?":
            return 0, 1
        case "+":
            return 1, None
        case int():
            return nargs, nargs
        case _:
            return 0, None


def _choices(keywords: Expressions, lists: Expressions) -> tuple[Any, ...]:
    """Return the choices of a flag; empty if it has none, or if SGLang computes them when it is imported."""
    try:
        return tuple(_constant(keywords["choices"], lists)) if "choices" in keywords else ()
    except ValueError:
        return ()


def _constant(node: ast.expr, lists: Expressions) -> Any:
    """Return the value of an expression of literals, named lists and sums of lists.

    Raises:
        ValueError: It is another expression.
    """
    if isinstance(node, ast.Name) and node.id in lists:
        return _constant(lists[node.id], {})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_constant(node.left, lists), *_constant(node.right, lists)]
    return ast.literal_eval(node)


def _not_none(kind: ast.expr) -> ast.expr:
    """Return X of ``Optional[X]`` and of ``X | None``."""
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Optional":
        return kind.slice
    if isinstance(kind, ast.BinOp) and ast.unparse(kind.right) == "None":
        return kind.left
    return kind


def _words(kind: ast.expr) -> list[Any]:
    return [ast.literal_eval(item) for item in (kind.elts if isinstance(kind, ast.Tuple) else [kind])]


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _flag_text(argument: ast.expr) -> str:
    """Return the flag of a literal, or of an f-string with an empty prefix: ``f"--{prefix}policy"``."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    if isinstance(argument, ast.JoinedStr):
        return "".join(str(part.value) for part in argument.values if isinstance(part, ast.Constant))
    return ""


# Read ``--sglang-config FILE``: SGLang's own form becomes its flags, so that a run checks the settings of the file.
#
# Related launchers give another file by this flag: groups of servers that differ.


CONFIG = "--config"
_GROUPS = {"sglang", "server_groups", "engine_groups", "prefill_num_servers"}
_INLINE = "base64:"


def read_server_config(path: str) -> tuple[list[str], str | None]:
    """Return the words of SGLang's flags in a file, and why it cannot be obeyed with what to do; None if it can."""
    try:
        is_inline = path.startswith(_INLINE)
        text = b64decode(path.removeprefix(_INLINE)) if is_inline else Path(path).read_bytes()
        content = yaml.safe_load(text.decode("utf-8"))
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        return [], f"{what}; check the path"
    except (ValueError, yaml.YAMLError) as error:
        return [], f"is no YAML ({one_line(str(error), 200)}); correct it"
    settings = {} if content is None else content
    if isinstance(settings, dict) and (groups := sorted(_GROUPS & {*map(str, settings)})):
        rule = f"describes groups of servers ({', '.join(groups)}), and all engines of a run are equal"
        size = "their size as --rollout-num-gpus-per-engine, and what they share as --sglang-NAME"
        return [], f"{rule}; drop it, and give {size}"
    if not isinstance(settings, dict):
        return [], "must be a mapping from SGLang's flags to their values; correct it"
    return [word for key, value in settings.items() for word in _words_of(f"--{key}", value)], None


def _words_of(flag: str, value: Any) -> Iterator[str]:
    known = server_flags()
    flag = flag if flag in known else flag.replace("_", "-")
    if isinstance(value, bool) and (flag not in known or known[flag].most == 0):
        yield from [flag] if value else []
    elif isinstance(value, list):
        yield from [flag, *map(str, value)] if value else []
    else:
        yield flag
        yield json.dumps(value, separators=(",", ":")) if isinstance(value, dict | bool) else str(value)
