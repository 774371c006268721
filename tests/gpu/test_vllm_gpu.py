"""Test ``--rollout-engine vllm`` on GPUs: weights over NCCL, and through shared memory to an engine that takes turns.

The tests need vLLM in the environment of the run. They have not run yet: transfer.py has run over gloo and on CPU.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.run_checks import engine_against_trainer
from tests.gpu.test_sglang_gpu import CHECKED, assert_learns

pytestmark = pytest.mark.timeout(1800)

FLAGS = ["--device", "cuda", "--rollout-engine", "vllm", "--bf16", "--num-rollout", "3", *CHECKED]


@pytest.mark.gpus(2)
@pytest.mark.parametrize("mode", ["broadcast", "disk", "ipc"])
def test_weights_reach_a_vllm_server_on_another_gpu(launch: Any, mode: str) -> None:
    run = launch(f"vllm_apart_{mode}", *FLAGS, "--update-weight-transfer-mode", mode)
    assert run.wait() == 0, run.err
    assert_learns(run)


@pytest.mark.gpus(3)
def test_broadcast_to_a_vllm_server_of_two_gpus(launch: Any) -> None:
    run = launch("vllm_parallel", *FLAGS, "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2")
    assert run.wait() == 0, run.err
    assert_learns(run)


def test_trainer_and_vllm_take_turns_on_one_gpu(launch: Any, record_property: Any) -> None:
    claim = ["--colocate", "--offload-train", "--offload-rollout", "--vllm-gpu-memory-utilization", "0.8"]
    run = launch("vllm_turns", *FLAGS, *claim, "--update-weight-transfer-mode", "ipc")
    assert run.wait() == 0, run.err
    assert_learns(run)
    record_property("figures", json.dumps({"engine - trainer": engine_against_trainer(run.output)}))
