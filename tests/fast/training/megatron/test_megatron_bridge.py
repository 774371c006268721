"""``--megatron-to-hf-mode bridge`` on real ranks (bridge_checks.py), if its packages are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[3]


def _missing() -> str:
    try:
        version("megatron-bridge")
    except PackageNotFoundError:
        return "megatron-bridge"
    return "" if find_spec("transformer_engine") else "transformer-engine"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(_missing()), reason=f"{_missing()} is not installed: Megatron-Bridge was not tested")
def test_bridge(tmp_path: Path) -> None:
    """Models that raw converts are equal; Mistral and Nemotron agree with transformers and the oracle."""
    folders = [ROOT, ROOT / "tests/fast", ROOT / "tests/fast/conformance"]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(HERE / "bridge_checks.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads((tmp_path / "results.json").read_text())
    failures = [f"{layout}: {check}\n{said}" for layout, of in results.items() for check, said in of.items() if said]
    assert len(results) == 6 and not failures, "\n\n".join(failures)
