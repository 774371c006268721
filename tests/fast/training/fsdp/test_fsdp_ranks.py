"""The FSDP backend in real processes over gloo; the checks are in state_checks.py and critic_checks.py.

tests/fast/conformance checks what a step computes. Each check is one test per number of ranks, with the check's name.
All checks run once, in one process tree (launch.py).
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def _names(file: str, *tuples: str) -> list[str]:
    """Return the checks listed in the constants ``tuples`` of ``file``, without importing it."""
    found = []
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in tuples:
            assert isinstance(node.value, ast.Tuple)
            found += [ast.unparse(element) for element in node.value.elts]
    return found


STATE = _names("state_checks.py", "CHECKS") + _names("critic_checks.py", "CHECKS")
OF_WORLD = {
    1: STATE + _names("state_checks.py", "AFTER_TWO_RANKS") + _names("critic_checks.py", "AFTER_TWO_RANKS"),
    2: STATE + _names("state_checks.py", "ON_TWO_RANKS"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("fsdp")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE.parents[1])]),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(HERE / "launch.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.timeout(320)
@pytest.mark.parametrize(("world", "check"), [(world, name) for world, names in OF_WORLD.items() for name in names])
def test_on_ranks(results: dict[str, dict[str, str]], world: int, check: str) -> None:
    failures = results[str(world)][check]
    assert not failures, failures
