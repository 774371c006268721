"""Every flag reaches code: a field of the settings that only checks read would be obeyed in name only."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import miles
from miles.config.settings import SECTIONS

PACKAGE = Path(miles.__file__).parent
JUDGE = ("check", "notes", "explain", "unused", "refuse", "settle")  # functions that say something, and do nothing

# Switches that confirm a default; the validator refuses them if the default is another one.
CONFIRM = {
    "offload_train": "the default with --colocate on GPUs",
    "offload_rollout": "the default with --colocate on GPUs",
    "enable_mtp_training": "--mtp-num-layers is refused or noted without it",
}


def nodes_that_act(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below ``node``, without functions that only judge settings."""
    for child in ast.iter_child_nodes(node):
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and child.name.strip("_").startswith(JUDGE):
            continue
        yield child
        yield from nodes_that_act(child)


def names_read(path: Path) -> set[str]:
    """Return the attributes that a file reads, in functions that act; those that are in tables also by ``getattr``."""
    nodes = list(nodes_that_act(ast.parse(path.read_text(encoding="utf-8"))))
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    if PACKAGE / "objective" in path.parents or path == PACKAGE / "config" / "evaluation.py":
        read |= {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return read


def test_every_field_is_read_by_code_that_acts():
    files = [
        path
        for path in PACKAGE.rglob("*.py")
        if "compat" not in path.relative_to(PACKAGE).parts
        if path.name not in ("explain.py", "needs.py")
    ]
    read = set[str]().union(*map(names_read, files))
    fields = {field.name for section in SECTIONS.values() for field in dataclasses.fields(section)}
    assert fields - read == set(CONFIRM)


def test_a_field_that_is_only_checked_is_found(tmp_path):
    (tmp_path / "rules.py").write_text(
        "def check_it(s):\n    return s.checked\ndef _explain(s):\n    return s.said\ndef act(s):\n    return s.used\n"
    )
    assert names_read(tmp_path / "rules.py") == {"used"}
