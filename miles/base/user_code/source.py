"""Look for a name in the source of a module. An import would run the module, which may take long or need a GPU."""

from __future__ import annotations

import ast
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from miles.base.user_code.loading import no_such_name

LARGEST = 2**18  # bytes of a source that is read: parsing them takes about 0.2 s

# What can bind names of a module that no statement of its source binds.
_BINDING_NAMES = frozenset(("globals", "locals", "vars", "exec", "eval", "setattr", "builtins", "__builtins__"))
_BINDING_ATTRIBUTES = frozenset(("modules", "f_globals", "__globals__", "__dict__"))  # as in sys.modules
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def missing_name(module: str, name: str, kind: str) -> str | None:
    """Return what is wrong if ``module`` certainly has no ``name``; None if it has one, or in doubt.

    In doubt are a module whose source is not found, and one that may bind the name while it runs: by a star import,
    ``__getattr__``, ``globals()`` and the like. If several folders have a module of that name, one with the name is
    enough.

    Args:
        module: A module's name, with dots.
        name: The name of the attribute.
        kind: The kind of object for the message: function, class.
    """
    if hasattr(sys.modules.get(module), name):
        return None
    folders = [Path.cwd(), Path(__file__).parents[2], *map(Path, sys.path)]
    found = [read_names(file) for file in module_files(module, dict.fromkeys(folders))]
    if not found or any(names is None or name in names.bound | names.mentioned for names in found):
        return None
    near = get_close_matches(name, {name for names in found if names is not None for name in names.bound}, n=1)
    return no_such_name(module, name, kind, f"did you mean {near[0]}? " if near else "")


def module_files(module: str, folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the source files of modules of this name in ``folders``."""
    parts = module.split(".")
    for folder in folders:
        for file in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if os.path.isfile(file):  # unlike Path.is_file, false for a name that is too long
                yield file


@dataclass(frozen=True)
class Names:
    """Names in a source.

    Attributes:
        bound: Those that its statements bind in the module, also if they run only in some cases.
        mentioned: Texts, and names of attributes that are set; code may bind them.
    """

    bound: set[str]
    mentioned: set[str]


def read_names(file: Path) -> Names | None:
    """Return the names in a source; None if it cannot be read, or may bind any name while it runs."""
    try:
        with file.open("rb") as source:
            text = source.read(LARGEST + 1)
        if len(text) > LARGEST:
            return None
        with warnings.catch_warnings(action="ignore"):  # of escapes in texts
            tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    bound, mentioned = set(_bound_in_module(tree)), set[str]()
    if "*" in bound or "__getattr__" in bound:
        return None
    ordinary = set(_ordinary_module_names(tree))
    for node in ast.walk(tree):
        if _may_bind_any(node) or (isinstance(node, ast.Name) and node.id == "__name__" and node not in ordinary):
            return None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            mentioned.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.add(node.value)
        elif isinstance(node, ast.Global):
            bound.update(node.names)
    return Names(bound, mentioned)


def _may_bind_any(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return node.name in _BINDING_NAMES | _BINDING_ATTRIBUTES
    if isinstance(node, ast.Attribute):
        return node.attr in _BINDING_ATTRIBUTES
    return isinstance(node, ast.Name) and node.id in _BINDING_NAMES


def _bound_in_module(tree: ast.Module) -> Iterator[str]:
    """Yield the names that statements bind outside functions and classes; ``*`` for a star import."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, (*_DEFINITIONS, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        inside = {id(child) for child in node.body} if isinstance(node, _DEFINITIONS) else ()
        nodes += [child for child in ast.iter_child_nodes(node) if id(child) not in inside]


def _ordinary_module_names(tree: ast.Module) -> Iterator[ast.Name]:
    """Yield the uses of ``__name__`` that hand the module to nobody who could set its attributes."""
    for node in ast.walk(tree):
        used: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            used = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            used = node.args
        yield from (part for part in used if isinstance(part, ast.Name) and part.id == "__name__")
