"""Test both backends, both of Megatron's contracts, and padded rows on one GPU: ``pytest tests/gpu``."""

from __future__ import annotations

import json
from typing import Any

import pytest

# bf16 has 8 bits of mantissa: each activation has an error of 2e-3, and the errors of four layers' gradients add up. A
# wrong contract changes the gradient by a factor of at least 2.
BOUND = 0.05


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_bf16_gradients_equal_those_of_the_fp32_oracle(
    backend: str, model: str, run_program: Any, record_property: Any
) -> None:
    report = run_program("one_gpu.py", backend, model)
    distances = {name: report[name] for name in ("averages", "counts tokens", "padded")}
    # Without the speed: several of these tests share the GPU.
    record_property("figures", json.dumps(distances | {"peak GiB": report["peak_memory_gib"]}))
    assert all(distance < BOUND for distance in distances.values())
