"""The Megatron backend in real processes over gloo, layout by layout; the checks are in checks.py.

Each check is a test for each layout, by its name. All of them run once, in one process tree (launch.py).
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


def _constant(file: str, name: str) -> ast.expr:
    """The value of the constant ``name`` of ``file``, without importing it."""
    for node in ast.parse((HERE / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return node.value
    raise AssertionError(f"{file} has no {name}")


def _checks() -> list[str]:
    value = _constant("checks.py", "CHECKS")
    assert isinstance(value, ast.Tuple)
    return [ast.unparse(element) for element in value.elts]


def _layouts() -> list[str]:
    value = _constant("layouts.py", "LAYOUTS")
    assert isinstance(value, ast.Dict)
    return [ast.literal_eval(key) for key in value.keys if key is not None]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("megatron")
    path = os.pathsep.join([str(ROOT), str(HERE.parent / "fsdp"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "launch.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.timeout(420)
@pytest.mark.parametrize("check", _checks())
@pytest.mark.parametrize("layout", _layouts())
def test_on_layout(results: dict[str, dict[str, str]], layout: str, check: str) -> None:
    failures = results[layout][check]
    assert not failures, failures
