"""The FSDP backend in real processes over gloo; the checks are in the files that FILES names.

tests/fast/conformance checks a step's computation. Each check is one test per number of ranks, with the check's name.
All checks run once, in one process tree (launch.py).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from rank_scripts import run_checks

HERE = Path(__file__).parent


def _names(file: str, *tuples: str) -> list[str]:
    """Return the checks listed in the constants ``tuples`` of ``file``, without importing it."""
    names = []
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in tuples:
            assert isinstance(node.value, ast.Tuple)
            names += [ast.unparse(element) for element in node.value.elts]
    return names


FILES = tuple(f"{name}_checks.py" for name in ("state", "critic", "adapter", "distillation", "reference", "family"))
OF_WORLD = {
    1: [name for file in FILES for name in _names(file, "CHECKS", "AFTER_TWO_RANKS")],
    2: [name for file in FILES for name in _names(file, "CHECKS", "ON_TWO_RANKS")],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    return run_checks(HERE / "launch.py", tmp_path_factory.mktemp("fsdp"), seconds=870)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world", "check"), [(world, name) for world, names in OF_WORLD.items() for name in names])
def test_on_ranks(results: dict[str, dict[str, str]], world: int, check: str) -> None:
    failures = results[str(world)][check]
    assert not failures, failures
