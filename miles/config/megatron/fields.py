"""Make flags of the fields of Megatron's own dataclasses, as the installed version defines them.

The dataclasses are read from their source, because importing them needs torch and takes seconds. The flag of a field
follows from its name (``moe_router_dtype``: ``--moe-router-dtype``), unless Megatron declares another
(``argparse_meta``) or launch scripts use a public name (``PUBLIC_NAMES``).
"""

import argparse
import ast
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from miles.config.suggest import whole_numbers

DATACLASSES = {
    "TransformerConfig": "transformer/transformer_config.py",
    "MLATransformerConfig": "transformer/transformer_config.py",
    "ModelParallelConfig": "model_parallel_config.py",
    "DistributedDataParallelConfig": "distributed/distributed_data_parallel_config.py",
    "OptimizerConfig": "optimizer/optimizer_config.py",
}
PUBLIC_NAMES = {
    "gated_linear_unit": "--swiglu",
    "num_moe_experts": "--num-experts",
    "grad_reduce_in_fp32": "--accumulate-allreduce-grads-in-fp32",
    "attention_softmax_in_fp32": "--attention-softmax-in-fp32",
}
DESTINATION = "megatron:"  # prefix of these fields in argparse's namespace
Kind = Literal["int", "float", "str", "bool"]


@dataclass(frozen=True)
class MegatronField:
    """Describe one field: its flag, and the values it accepts."""

    name: str
    flag: str
    kind: Kind
    default: Any = None
    help: str = ""
    choices: tuple[str, ...] = ()
    is_list: bool = False

    @property
    def switch_to(self) -> bool:
        """The value that a switch sets, the opposite of the default: ``--disable-bias-linear`` sets False."""
        return True if self.flag == "--attention-softmax-in-fp32" else not self.default


# Verdicts on Megatron's fields, and the flags that are none of them: see fields.toml.
TABLE: dict[str, Any] = tomllib.loads((files(__package__) / "fields.toml").read_text(encoding="utf-8"))
MODEL_FLAGS = tuple(MegatronField(**row) for row in TABLE["model_flags"])


@cache
def megatron_fields() -> dict[str, MegatronField]:
    """Return every field that a flag can set, by name.

    Raises:
        ValueError: megatron-core is not installed.
    """
    root = _package()
    by_name: dict[str, MegatronField] = {}
    for class_name, file in DATACLASSES.items():
        for field in _fields_of(root / file, class_name):
            by_name.setdefault(field.name, field)
    return by_name


def installed_fields() -> tuple[MegatronField, ...]:
    """Return every field that a flag can set; without Megatron's own if megatron-core is not installed."""
    with suppress(ValueError):
        return (*MODEL_FLAGS, *megatron_fields().values())
    return MODEL_FLAGS


def add_megatron_flags(group: argparse._ArgumentGroup, taken: set[str]) -> list[MegatronField]:
    """Add the flags of all fields whose names and flags are not ``taken``; return the fields.

    Values are stored under ``DESTINATION`` + name. If two fields declare one flag (``fp4_param`` and
    ``fp4_param_gather``, from 0.17 on), the first gets it.
    """
    added, taken = [], {*taken}
    for field in (*MODEL_FLAGS, *megatron_fields().values()):
        if taken & {field.name, field.flag}:
            continue
        taken.add(field.flag)
        where: dict[str, Any] = {"dest": DESTINATION + field.name, "help": field.help, "default": None}
        if field.kind == "bool":
            group.add_argument(field.flag, action="store_const", const=field.switch_to, **where)
        else:
            kind = {"int": int, "float": float, "str": str}[field.kind]
            values: dict[str, Any] = {"type": kind}
            if field.is_list:
                values = {"nargs": "+", "type": whole_numbers if kind is int else kind}
            group.add_argument(field.flag, **values, choices=field.choices or None, **where)
        added.append(field)
    return added


def _package() -> Path:
    spec = find_spec("megatron")
    folders = spec.submodule_search_locations if spec else None
    for folder in folders or []:
        if (Path(folder) / "core" / DATACLASSES["TransformerConfig"]).is_file():
            return Path(folder) / "core"
    raise ValueError(
        "--train-backend megatron: megatron-core is not installed; install the extra, pip install 'miles[megatron]', "
        "or use --train-backend fsdp"
    )


def _fields_of(file: Path, class_name: str) -> Iterator[MegatronField]:
    body = next(node.body for node in _parsed(file).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = _field(node.target.id, node.annotation, node.value, _text(after))
            if field is not None:
                yield field


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _text(node: ast.AST | None) -> str:
    """Return the first sentence of the string after a field, which documents it."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split()).split(". ")[0].rstrip(".")[:200]
    return ""


def _field(name: str, annotation: ast.expr, value: ast.expr | None, text: str) -> MegatronField | None:
    kind = _kind(annotation)
    if kind is None or name.startswith("_"):
        return None
    default, names = _default(value)
    flag = PUBLIC_NAMES.get(name) or (names[0] if names else "--" + name.replace("_", "-"))
    if kind[0] == "bool" and default is True and not names and name not in PUBLIC_NAMES:
        flag = "--no-" + name.replace("_", "-")
    return MegatronField(name, flag, kind[0], default, text, *kind[1:])


_PLAIN: dict[str, Kind] = {"int": "int", "float": "float", "str": "str", "bool": "bool"}


def _kind(annotation: ast.expr) -> tuple[Kind, tuple[str, ...], bool] | None:
    """Return type, choices, and whether it is a list; None if no flag can hold it (functions, types, other objects)."""
    if isinstance(annotation, ast.Name):
        kind = _PLAIN.get(annotation.id)
        return None if kind is None else (kind, (), False)
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.value, ast.Name):
        return None
    outer, inner = annotation.value.id, annotation.slice
    if outer == "Optional":
        return _kind(inner)
    if outer == "Literal":
        values = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        return "str", tuple(ast.literal_eval(v) for v in values), False
    if outer in ("list", "List"):
        element = _kind(inner)
        return element and (element[0], element[1], True)
    if outer == "Union" and isinstance(inner, ast.Tuple):
        kinds = [kind for kind in map(_kind, inner.elts) if kind is not None]
        return (kinds[0][0], kinds[0][1], any(kind[2] for kind in kinds)) if kinds else None
    return None


def _default(value: ast.expr | None) -> tuple[Any, list[str]]:
    """Return the default (None if it is not a literal) and the flag names that Megatron declares for the field."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return _literal(value), []
    keywords = {keyword.arg: keyword.value for keyword in value.keywords}
    metadata = _literal(keywords.get("metadata")) or {}
    return _literal(keywords.get("default")), metadata.get("argparse_meta", {}).get("arg_names", [])


def _literal(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
