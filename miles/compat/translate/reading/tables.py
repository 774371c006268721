"""Read JSON, YAML and TOML into settings with lines."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import yaml

from miles.base import strict_json
from miles.compat.translate.settings import Document, Expression, Setting, by_key, fail, flatten

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
