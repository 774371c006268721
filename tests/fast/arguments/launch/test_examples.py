"""The scripts of examples/from_scripts/ are explained for a cluster, on a host without a GPU and without weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[4]
FOLDER = REPO / "examples" / "from_scripts"

# script, and what its explanation says
SCRIPTS = {
    "dense_grpo": [
        "8 ranks = TP 2 x CP 1 x DP 4 x PP 1",
        "8 SGLang engines of 1 device",
        "Qwen/Qwen3-4B_torch_dist",
        "--sglang-cuda-graph-bs-decode",
    ],
    "moe_offload": [
        "experts: EP 8 x ETP 1, 1 replica of each expert",
        "1 SGLang engine of 8 devices",
        "in host memory and updated there, overlapped with the copies",
        "miles.rollout.filters:check_reward_nonzero_std",
    ],
    "async_multi_turn": [
        "4 ranks = TP 2 x CP 2 x DP 1 x PP 1",
        "4 SGLang engines of 1 device",
        "--fully-async --async-steps 1",
        "--kl-loss-coef 0.001: without --use-kl-loss",
    ],
}


def explain(name: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", FOLDER / f"{name}.sh", "--explain", "--device", "cuda", *flags]
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_every_script_is_tried():
    assert {path.stem for path in FOLDER.glob("*.sh")} - {"common"} == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_is_explained(name):
    ended = explain(name)
    assert ended.returncode == 0, ended.stderr
    assert "backend megatron" in ended.stdout and "engine sglang" in ended.stdout
    said = " ".join(ended.stdout.split())
    assert [part for part in SCRIPTS[name] if part not in said] == []


def test_the_page_shows_the_overrides_that_run_on_cpu():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"{name}.sh" in page for name in SCRIPTS)
    assert "--train-backend fsdp --rollout-engine torch" in page
