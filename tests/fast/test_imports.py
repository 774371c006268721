"""Check the rules of docs/architecture.md that the source shows: who may import what, and how much one place holds."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
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


def imports(source: str, module: str = "", is_package: bool = False) -> set[str]:
    """Return the dotted names that a module imports or uses as attributes (``torch.distributed.barrier``)."""
    names: set[str] = set()
    for node in runtime_nodes(ast.parse(source)):
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
def found() -> dict[str, set[str]]:
    """Return what each module imports. Not computed at import: every worker of pytest-xdist imports this file."""
    return {module_name(p): imports(p.read_text(), module_name(p), p.name == "__init__.py") for p in SOURCES}


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


# Low to high: a module may import from its own layer and from those before it (docs/architecture.md, "Layers").
LAYERS = [
    ("input_error", "one_line", "host", "threads"),
    ("strict_json",),
    ("components", "secret_values", "metrics", "weights", "user_code", "junit", "stacks"),
    ("flags", "hidden_secrets", "replay"),
    ("choices", "remote"),
    ("sample", "train_batch", "profiling"),
    ("parallel", "model_families", "tiny_models"),
    ("objective",),
    ("rewards",),
    ("environments",),
    ("arguments",),
    ("data", "tracking", "weight_sync", "batching"),
    ("engine", "report"),
    ("rollout", "training"),
    ("cluster", "rehearsal"),
    ("saved_runs", "smoke", "one_process"),
    ("loop",),
    ("generation_loop",),
    ("launcher",),
    ("translate",),
    ("doctor", "quickstart", "sweep"),
    ("commands",),
    ("api",),
    ("cli",),
    ("__main__",),
]
BASICS = ("input_error", "one_line", "strict_json")  # what leaves may import
LEAVES = ("components", "metrics", "weights", "secret_values")
LEAVES += ("sample", "train_batch", "junit", "stacks")

# (module, what it must not import, exceptions)
FORBIDDEN = [
    *((f"miles.{leaf}", "miles", tuple(f"miles.{b}" for b in BASICS)) for leaf in LEAVES if leaf != "weights"),
    ("miles.base.user_code", "miles", ("miles.base.user_code", "miles.base.threads", *(f"miles.{b}" for b in BASICS))),
    ("miles.base.host", "torch", ()),
    ("miles.base.flags", "miles", ("miles.base.secret_values", *(f"miles.{b}" for b in BASICS))),
    ("miles.base.hidden_secrets", "miles", ("miles.base.secret_values",)),
    ("miles.base.secret_values", "torch", ()),
    ("miles.config", "torch", ()),
    ("miles.config", "transformers", ()),
    ("miles.objective", "ray", ()),
    ("miles.objective", "torch.distributed", ()),
    ("miles.commands.doctor_parts", "torch", ()),
    ("miles.commands.doctor_parts", "miles.run", ()),  # which imports Ray: a broken one must not break the doctor
    ("miles.observe.report", "torch", ()),
    ("miles.observe.report", "numpy", ()),
    ("miles.rollout", "miles.training", ()),
    ("miles.rollout", "miles.engine.sglang", ()),
    ("miles.rollout", "miles.engine.embedded", ()),
    ("miles.tasks.rewards", "miles.training", ()),
    ("miles.training", "miles.rollout", ()),
    ("miles.training", "miles.tasks.rewards", ()),
    ("miles.engine.embedded", "miles.engine.sglang", ()),
    ("miles.engine.sglang", "miles.engine.embedded", ()),
    ("miles.training.fsdp", "miles.training.megatron", ()),
    ("miles.training.megatron", "miles.training.fsdp", ()),
    ("miles.engine.weight_sync", "miles.training", ()),
    ("miles.commands.rehearsal", "miles.run", ()),
    ("miles.commands.rehearsal", "miles.rollout", ()),
    ("miles.engine.weight_sync", "transformers", ()),
]

# Imports that still point up, as (importing folder, imported folder). Add none.
ARROWS_UP: set[tuple[str, str]] = set()

# (library, the only modules that may import it)
RESERVED = [
    ("ray", ("miles.run",)),
    ("sglang", ("miles.engine.sglang",)),
    ("megatron", ("miles.training.megatron",)),
]


@pytest.mark.parametrize(("who", "forbidden", "allowed"), FORBIDDEN)
def test_layer_does_not_import(found: dict[str, set[str]], who: str, forbidden: str, allowed: tuple[str, ...]) -> None:
    against_the_rule = {
        f"{module} imports {name}"
        for module, names in found.items()
        if inside(module, who)
        for name in names
        # `from miles import x` also names miles itself; the rule is about its contents
        if inside(name, forbidden) and name != "miles" and not any(inside(name, a) for a in allowed)
    }
    assert not against_the_rule


def test_imports_point_down(found: dict[str, set[str]]) -> None:
    level = {folder: number for number, layer in enumerate(LAYERS) for folder in layer}
    arrows = {
        (module.split(".")[1], name.split(".")[1])
        for module, names in found.items()
        for name in names
        if inside(module, "miles") and inside(name, "miles") and "." in module and "." in name
    }
    folders = {name for arrow in arrows for name in arrow} - {"__version__"}
    assert folders <= level.keys(), "name the layer of every folder and module of miles"
    known = {(a, b) for a, b in arrows if a in level and b in level}
    up = {(a, b) for a, b in known if level[a] < level[b] or (level[a] == level[b] and a != b and (b, a) in known)}
    assert up <= ARROWS_UP, "an import runs up, or two folders import each other"
    assert up >= ARROWS_UP, "remove from ARROWS_UP what no longer runs up"


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


def test_no_files_import_each_other_in_a_circle(found: dict[str, set[str]]) -> None:
    """Also not inside functions: what two files share belongs in a file below both."""
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    files = {module: (names & found.keys()) - {module} for module, names in found.items()}
    assert "miles.objective.registry" in files["miles.objective.chosen"]
    assert not circles(files)


@pytest.mark.parametrize(("library", "owners"), RESERVED)
def test_library_is_imported_only_by_its_owner(
    found: dict[str, set[str]], library: str, owners: tuple[str, ...]
) -> None:
    importers = {m for m, names in found.items() if any(inside(n, library) for n in names)}
    assert not {m for m in importers if not any(inside(m, owner) for owner in owners)}


def test_imports_are_found_anywhere() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import hidden\n"
        "def f():\n    from torch import distributed\n    import ray.util\n    torch.cuda.empty_cache()\n"
        "from . import base\n"
    )
    names = imports(source, "miles.engine.anything")
    assert {"torch.distributed", "ray.util", "torch.cuda", "miles.engine.base"} <= names
    assert "hidden" not in names


def test_modules_and_functions_are_small() -> None:
    texts = {module_name(p): p.read_text() for p in SOURCES}
    assert not [name for name, text in texts.items() if len(text.splitlines()) > 600]
    functions = [
        (f"{name}.{node.name}", node.end_lineno - node.lineno + 1)
        for name, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert not [(name, lines) for name, lines in functions if lines > 60]


@pytest.mark.parametrize("root", ["miles", "tests/fast"])
def test_folder_is_small(root: str) -> None:
    """At most 20 files beside ``__init__.py`` on one level."""
    files = Counter(str(p.parent.relative_to(ROOT)) for p in (ROOT / root).rglob("*.py") if p.name != "__init__.py")
    assert not {folder: number for folder, number in files.items() if number > 20}, "group its files into folders"


def test_the_default_threads_of_asyncio_are_left_to_the_users_code() -> None:
    """A call of the user's that never returns holds one for good, and none of ``miles/base/threads.py``."""
    default_threads = re.compile(r"\bto_thread\(|run_in_executor\(None")
    assert not {module_name(p) for p in SOURCES if default_threads.search(p.read_text())}


def test_no_module_is_called_utils() -> None:
    assert not [m for m in map(module_name, SOURCES) if {"utils", "util", "helpers", "misc"} & set(m.split("."))]


def test_no_machine_paths() -> None:
    machine = re.compile(r"(?<![\w.])/(?:home|work|root|opt|Users|mnt)/\w")
    found = {str(p.relative_to(ROOT)) for p in TEXTS if machine.search(p.read_text(errors="replace"))}
    assert not found
