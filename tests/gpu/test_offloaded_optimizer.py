"""Test ``--optimizer-cpu-offload`` on one GPU: results are the same, and the GPU holds less."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fast.support.tolerance import RELATIVE_ERROR

# The state is fp32: both kernels of AdamW round each operation, in another order.
WEIGHTS = 2.0**-7  # a state that differs so little rounds to the same bf16 weight or to its neighbour


@pytest.mark.timeout(600)
def test_megatron_updates_in_host_memory_as_on_the_gpu(run_program: Any, record_property: Any) -> None:
    report = run_program("offloaded_optimizer.py")
    record_property("figures", json.dumps(report))
    ordinary = report.pop("ordinary")["bytes"]
    for way, measured in report.items():
        assert measured["state"] <= RELATIVE_ERROR and measured["weights"] <= WEIGHTS, way
        # fp32 weights and two moments take 12 bytes per parameter.
        assert ordinary - measured["bytes"] >= (5 if way == "half" else 10), way
