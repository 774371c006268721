"""Test both backends, both of Megatron's contracts, and padded rows on one GPU: ``pytest tests/gpu -s``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# bf16 has 8 bits of mantissa: each activation has an error of 2e-3, and the errors of four layers' gradients add up. A
# wrong contract changes the gradient by a factor of at least 2.
BOUND = 0.05


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_bf16_gradients_equal_those_of_the_fp32_oracle(backend: str, model: str, tmp_path: Path) -> None:
    """Run in a separate process, because Megatron creates its process groups once per process."""
    own = [str(ROOT), str(ROOT / "tests/fast/conformance"), str(ROOT / "tests/fast/support")]
    paths = [*own, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "one_gpu.py"), backend, model, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(
        f"\n{backend}, {model}: {found['tokens_per_second']:.0f} tokens/s, "
        f"peak {found['peak_memory_gib']:.2f} GiB; distances "
        + ", ".join(f"{name} {found[name]:.1e}" for name in ("averages", "counts tokens", "padded"))
    )
    assert all(found[name] < BOUND for name in ("averages", "counts tokens", "padded"))
