"""Test ``--optimizer-cpu-offload`` on one GPU: results are the same, and the GPU holds less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STATE = 1e-5  # fp32: both kernels of AdamW round each operation, in another order
WEIGHTS = 2.0**-7  # a state that differs so little rounds to the same bf16 weight or to its neighbour


@pytest.mark.timeout(600)
def test_megatron_updates_in_host_memory_as_on_the_gpu(tmp_path: Path) -> None:
    own = [str(ROOT), str(ROOT / "tests/fast/conformance"), str(ROOT / "tests/fast/support")]
    paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "offloaded_optimizer.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(f"\n{found}")
    ordinary = found.pop("ordinary")["bytes"]
    for way, measured in found.items():
        assert measured["state"] <= STATE and measured["weights"] <= WEIGHTS, way
        # fp32 weights and two moments take 12 bytes per parameter.
        assert ordinary - measured["bytes"] >= (5 if way == "half" else 10), way
