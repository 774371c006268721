"""Test ``--offload-train`` on one GPU with both backends: memory is freed, and results are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fsdp", "megatron", "megatron, distributed optimizer"])
def test_the_trainer_leaves_the_gpu_and_comes_back(run_program: Any, record_property: Any, backend: str) -> None:
    report = run_program("offloaded_trainer.py", backend)
    record_property("figures", json.dumps(report))
    assert report["is_equal"]
    assert report["trained"] >= 14  # bytes per parameter: fp32 weights and two moments, and weights in bf16
    assert report["offloaded"] <= 0.5  # cuBLAS's and other libraries' own memory
