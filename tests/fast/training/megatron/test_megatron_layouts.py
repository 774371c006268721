"""The Megatron backend on real ranks over gloo, layout by layout (layouts.py), in one process tree (launch.py)."""

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


def _layouts() -> list[str]:
    """The keys of ``LAYOUTS``, without importing Megatron."""
    for node in ast.parse((HERE / "layouts.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYOUTS":
            assert isinstance(node.value, ast.Dict)
            return [ast.literal_eval(key) for key in node.value.keys if key is not None]
    raise AssertionError("layouts.py has no LAYOUTS")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = tmp_path_factory.mktemp("megatron")
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests/fast/conformance"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "launch.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", _layouts())
def test_layout(results: dict[str, dict[str, str]], layout: str) -> None:
    """Both contracts with Megatron against the oracle, and where listed conversion, optimizer and reference."""
    assert len(results[layout]) >= 2
    failures = {check: failure for check, failure in results[layout].items() if failure}
    assert not failures, "\n\n".join(f"{check}\n{failure}" for check, failure in failures.items())
