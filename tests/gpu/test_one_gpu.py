"""Test both backends, both of Megatron's contracts, and padded rows on one GPU: ``pytest tests/gpu -s``."""

from __future__ import annotations

from typing import Any

import pytest

# bf16 has 8 bits of mantissa: each activation has an error of 2e-3, and the errors of four layers' gradients add up. A
# wrong contract changes the gradient by a factor of at least 2.
BOUND = 0.05


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["dense", "experts"])
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_bf16_gradients_equal_those_of_the_fp32_oracle(backend: str, model: str, run_program: Any) -> None:
    found = run_program("one_gpu.py", backend, model)
    print(
        f"\n{backend}, {model}: {found['tokens_per_second']:.0f} tokens/s, "
        f"peak {found['peak_memory_gib']:.2f} GiB; distances "
        + ", ".join(f"{name} {found[name]:.1e}" for name in ("averages", "counts tokens", "padded"))
    )
    assert all(found[name] < BOUND for name in ("averages", "counts tokens", "padded"))
