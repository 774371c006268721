"""Check the rules of docs/architecture.md that the source shows: who may import what, and how much one place holds."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "miles").rglob("*.py")) + [
    p for p in [ROOT / "train.py", ROOT / "train_async.py"] if p.exists()
]
TEXTS = [
    path
    for folder in ("miles", "tests", "docs", "examples", "benchmarks", "scripts", ".ci")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.is_file() and path.suffix in {".py", ".md", ".sh", ".yml", ".toml", ".txt", ""}
] + sorted(p for p in ROOT.iterdir() if p.suffix in {".py", ".md", ".yml", ".toml", ".txt"})


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every node below ``node`` that can run: also in functions, but not imports for annotations."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for alternative in child.orelse:
                yield alternative
                yield from runtime_nodes(alternative)
            continue
        yield child
        yield from runtime_nodes(child)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module, module: str = "", is_package: bool = False, with_types: bool = False) -> set[str]:
    """Return the dotted names that a module imports or uses as attributes (``torch.distributed.barrier``).

    ``with_types``: also names that are imported for annotations only.
    """
    names: set[str] = set()
    for node in ast.walk(tree) if with_types else runtime_nodes(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")
            parents = package[: len(package) - node.level + is_package] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names.update({base, *(f"{base}.{alias.name}" for alias in node.names)})
        elif isinstance(node, ast.Attribute) and (name := dotted(node)).startswith("torch."):
            names.add(name)
    return names


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` of an attribute of a name; nothing of an attribute of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Return what each module imports. Not computed at import: every worker of pytest-xdist imports this file."""
    return {module_name(p): imports(tree(p), module_name(p), p.name == "__init__.py") for p in SOURCES}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# What each room may import of the others (docs/architecture.md, "Rooms"). Imports for annotations count too.
ROOMS = {
    "base": (),
    "types": ("base",),
    "models": ("base", "types"),
    "objective": ("base", "types"),
    "tasks": ("base", "types", "models"),
    "config": ("base", "types", "models", "objective", "tasks"),
    "compat": ("base", "types", "models", "objective", "tasks", "config"),
    "engine": ("base", "types", "models", "config"),
    "batch": ("base", "types", "models", "objective", "config"),
    "rollout": ("base", "types", "models", "objective", "tasks", "config", "engine", "batch"),
    "training": ("base", "types", "models", "objective", "config", "batch"),
    "observe": ("base", "types", "objective", "config"),
}
ROOMS["run"] = (*(room for room in ROOMS if room != "compat"),)
ROOMS["commands"] = (*ROOMS,)
LOOSE = ("__init__", "__main__", "api", "cli", "version")

# (module, forbidden imports, exceptions)
FORBIDDEN = [
    ("miles.base.host", "torch", ()),
    ("miles.base.secrets", "torch", ()),
    ("miles.config", "torch", ()),
    ("miles.config", "transformers", ()),
    ("miles.objective", "ray", ()),
    ("miles.objective", "torch.distributed", ()),
    ("miles.commands.doctor", "torch", ()),
    ("miles.commands.doctor", "miles.run", ()),  # which imports Ray: a broken one must not break the doctor
    *((f"miles.observe.{page}", library, ()) for page in ("page", "health") for library in ("torch", "numpy")),
    ("miles.rollout", "miles.engine.sglang", ()),
    ("miles.rollout", "miles.engine.embedded", ()),
    ("miles.engine.embedded", "miles.engine.sglang", ()),
    ("miles.engine.sglang", "miles.engine.embedded", ()),
    ("miles.training.fsdp", "miles.training.megatron", ()),
    ("miles.training.megatron", "miles.training.fsdp", ()),
    ("miles.commands.rehearsal", "miles.run", ()),
    ("miles.commands.rehearsal", "miles.rollout", ()),
    ("miles.engine.weight_sync", "transformers", ()),
]

# (library, the only modules that may import it)
RESERVED = [
    ("ray", ("miles.run",)),
    ("sglang", ("miles.engine.sglang",)),
    ("megatron", ("miles.training.megatron",)),
]


@pytest.mark.parametrize(("who", "forbidden", "allowed"), FORBIDDEN)
def test_layer_does_not_import(
    imported: dict[str, set[str]], who: str, forbidden: str, allowed: tuple[str, ...]
) -> None:
    against_the_rule = {
        f"{module} imports {name}"
        for module, names in imported.items()
        if inside(module, who)
        for name in names
        # `from miles import x` also names miles itself; the rule is about its contents
        if inside(name, forbidden) and name != "miles" and not any(inside(name, a) for a in allowed)
    }
    assert not against_the_rule


def test_rooms_import_what_the_table_allows() -> None:
    entries = {path.name if path.is_dir() else path.stem for path in (ROOT / "miles").iterdir()}
    assert entries - {"__pycache__", "py"} == {*ROOMS, *LOOSE}, "a file or folder of miles is in no room"
    broken = {
        (module, room)
        for path in SOURCES
        if (module := module_name(path)).count(".") and module.split(".")[1] in ROOMS
        for name in imports(tree(path), module, path.name == "__init__.py", with_types=True)
        if inside(name, "miles") and "." in name and (room := name.split(".")[1]) in ROOMS
        if room not in (*ROOMS[module.split(".")[1]], module.split(".")[1])
    }
    assert not broken


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of nodes that can all reach each other (strongly connected components, Tarjan 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for other in graph[node]:
            if other not in number:
                visit(other)
                lowest[node] = min(lowest[node], lowest[other])
            elif other in stack:
                lowest[node] = min(lowest[node], number[other])
        if lowest[node] == number[node]:
            start = stack.index(node)
            groups.append(sorted(stack[start:]))
            del stack[start:]

    for node in graph:
        if node not in number:
            visit(node)
    return sorted(group for group in groups if len(group) > 1)


def test_no_files_import_each_other_in_a_circle(imported: dict[str, set[str]]) -> None:
    """Also not inside functions: what two files share belongs in a file below both."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    files = {module: (names & imported.keys()) - {module} for module, names in imported.items()}
    assert "miles.objective.kl" in files["miles.objective.chosen"]
    assert not circles(files)


@pytest.mark.parametrize(("library", "owners"), RESERVED)
def test_library_is_imported_only_by_its_owner(
    imported: dict[str, set[str]], library: str, owners: tuple[str, ...]
) -> None:
    importers = {m for m, names in imported.items() if any(inside(n, library) for n in names)}
    assert not {m for m in importers if not any(inside(m, owner) for owner in owners)}


def test_imports_are_found_anywhere() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "def f():\n    from torch import distributed\n    import ray.util\n    torch.cuda.empty_cache()\n"
        "from . import base\n"
    )
    names = imports(ast.parse(source), "miles.engine.anything")
    assert {"torch.distributed", "ray.util", "torch.cuda", "miles.engine.base"} <= names
    assert "hidden" not in names


def test_functions_are_small() -> None:
    functions = [
        (f"{module_name(path)}.{node.name}", node.end_lineno - node.lineno + 1)
        for path in SOURCES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert not [(name, lines) for name, lines in functions if lines > 60]


def test_the_default_threads_of_asyncio_are_left_to_the_users_code() -> None:
    """A call of the user's that never returns holds one for good, and none of ``miles/base/threads.py``."""
    default_threads = re.compile(r"\bto_thread\(|run_in_executor\(None")
    assert not {module_name(p) for p in SOURCES if default_threads.search(p.read_text())}


def test_no_module_is_called_utils() -> None:
    assert not [m for m in map(module_name, SOURCES) if {"utils", "util", "helpers", "misc"} & set(m.split("."))]


def test_no_machine_paths() -> None:
    machine = re.compile(r"(?<![\w.])/(?:home|work|root|opt|Users|mnt)/\w")
    paths = {str(p.relative_to(ROOT)) for p in TEXTS if machine.search(p.read_text(errors="replace"))}
    assert not paths
