"""The scripts of examples/from_scripts/ are explained for a cluster, on a host without a GPU and without weights."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[4]
FOLDER = REPO / "examples" / "from_scripts"

# script, and words of its explanation
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


def commands_on_cpu() -> dict[str, str]:
    """Return the commands that the page shows for a CPU, by the name of their script."""
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```diff\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    commands = ["".join(line[1:] for line in block.splitlines(keepends=True)) for block in blocks]
    return {re.search(r"(\w+)\.sh", command)[1]: command for command in commands}


def test_the_page_shows_what_is_added_to_each_script():
    assert commands_on_cpu().keys() == SCRIPTS.keys()
    for name, command in commands_on_cpu().items():
        assert f"bash examples/from_scripts/{name}.sh" in command and "--rollout-engine torch" in command


# script, and the metrics of its second iteration
METRICS = {
    "dense_grpo": {"train/pg_loss", "train/kl_loss", "train/grad_norm", "rollout/reward", "eval/problems/accuracy"},
    "moe_offload": {"train/pg_loss", "train/tis", "train/grad_norm", "rollout/reward"},
    "async_multi_turn": {"train/pg_loss", "train/tis", "train/grad_norm", "rollout/reward"},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_trains_on_a_cpu_as_the_page_shows(name, tmp_path):
    """Only its folder of outputs is another one, so that the checkout stays unchanged."""
    command = commands_on_cpu()[name].replace("outputs/from_scripts", str(tmp_path))
    command = command.replace("python examples", f"{shlex.quote(sys.executable)} examples").rstrip()
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    run = ["bash", "-euo", "pipefail", "-c", f"{command} --output-dir {tmp_path / 'run'}"]
    ended = subprocess.run(run, cwd=REPO, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = {metric for row in rows for metric in row}
    assert not METRICS[name] - metrics, sorted(metrics)
    assert sum("rollout/reward" in row for row in rows) == 2
    assert any(tmp_path.glob("*/iter_0000002")), "a checkpoint in SAVE"
