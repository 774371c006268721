"""Test runs with SGLang on one GPU: two equal ones with ``--deterministic-mode``, one that trains an adapter, and one
whose server is killed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fast.support.tolerance import FEW_ROUNDINGS
from tests.gpu.run_checks import (
    KILLED_ROLLOUTS,
    assert_adapter,
    assert_equal_runs,
    engine_against_trainer,
    kill_server,
    metrics,
)
from tests.gpu.sglang_engine import ENGINE, ON_GPU, SMALL

pytestmark = pytest.mark.timeout(300)

SHORT = "--num-rollout 2 --rollout-max-response-len 32"
DETERMINISTIC = f"{SHORT} --deterministic-mode --global-batch-size 16"
LORA = f"{SHORT} --lora-rank 4 --lora-alpha 8 --lr 3e-2 --lr-decay-style constant"
KILLED = f"--use-fault-tolerance --num-rollout {KILLED_ROLLOUTS} --rollout-max-response-len 32"
LORA += " --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k3 --check-weight-update-equal"
# Difference of log-probs between engine and trainer, both in bf16, with equal weights.
SAME_WEIGHTS = 0.05


def flags(more: str, device: str = "cuda") -> list[str]:
    return ["--device", device, *f"{ENGINE} {SMALL} {ON_GPU if device == 'cuda' else ''} {more}".split()]


def test_a_server_that_dies_on_one_gpu_is_replaced(launch: Any, record_property: Any) -> None:
    run = launch("sglang_killed", *flags(KILLED))
    kill_server(run)
    difference = engine_against_trainer(run.output)
    record_property("figures", json.dumps({"engine - trainer": difference}))
    assert difference < SAME_WEIGHTS


def test_two_deterministic_runs_are_equal(launch: Any, workplace: Path, record_property: Any) -> None:
    runs = []
    for number in range(2):
        folder = workplace / f"sglang_repeated_{number}"
        run = launch(folder.name, *flags(DETERMINISTIC), "--save-hf", str(folder / "hf"))
        assert run.wait() == 0, run.err
        runs.append(run.output)
    record_property("figures", json.dumps({"engine - trainer": engine_against_trainer(runs[0])}))
    assert_equal_runs(*runs)
    assert all(row["train/grad_norm"] > 0 for row in metrics(runs[0]).values())


def test_an_adapter_is_served_as_part_of_the_weights(
    launch: Any, workplace: Path, tiny_model: str, record_property: Any
) -> None:
    exported = workplace / "sglang_lora" / "hf"
    run = launch("sglang_lora", *flags(LORA), "--save-hf", str(exported))
    assert run.wait() == 0, run.err
    rows = metrics(run.output)
    assert sorted(rows) == [1, 2, 3, 4]
    # Step 3 trains on the first responses after two steps: the engine then has the sum of weights and adapter.
    moved, between = rows[3]["train/kl_loss"], rows[3]["train/train_rollout_logprob_abs_diff"]
    record_property("figures", json.dumps({"moved from the base": moved, "engine - trainer": between}))
    # The reference is the model without its adapter.
    assert rows[1]["train/kl_loss"] == pytest.approx(0.0, abs=FEW_ROUNDINGS)
    assert between < SAME_WEIGHTS and moved > 5 * SAME_WEIGHTS**2
    assert_adapter(Path(tiny_model), exported / "adapter", exported, torch.bfloat16)
