"""The measured training step of tests/gpu with a small model on CPU, up to its page."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import train_step
from tests.gpu.make_model import write_model
from tests.gpu.page import page

REPO = Path(__file__).resolve().parents[3]
FLAGS = ["--micro-tokens", "256", "--micro-batches", "2", "--sample-tokens", "64", "--warm-up", "0", "--steps", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"), small=True)


def run_step(model, result, *more):
    words = [sys.executable, "tests/gpu/train_step.py", str(model), str(result), "--device", "cpu", *FLAGS, *more]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(result.read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "more"),
    [("fsdp", ["--unequal", "--flags", "--qkv-format bshd"]), ("megatron", ["--fused"])],
    ids=["fsdp, padded", "megatron, fused"],
)
def test_a_step_is_measured_and_shown(model, tmp_path, backend, more):
    name = f"step-{backend}"
    report = run_step(model, tmp_path / f"{name}.json", "--backend", backend, *more)
    assert report["seconds"] > 0 and report["tokens_per_second"] > 0 and report["phases"]["time/forward_backward"] > 0
    assert report["foreseen_gib"] > 0 and 0 < report["largest_gib"] < 0.1
    assert report["logits_gib"] == 4 * 1000 * 256 / 1024**3
    assert "aten::" in (tmp_path / f"{name}.txt").read_text()
    (tmp_path / "parts.tsv").write_text(f"{name}\tok\t9\t\n")
    (row,) = [line for line in page(tmp_path) if line.startswith(f"| {backend} |")]
    assert f"{report['tokens_per_second']:.0f}" in row and "peak unknown" in row


def test_the_operations_of_a_step_are_those_of_a_4b_model():
    """Six per weight and token, and 6 x layers x width of heads x length per token for causal attention."""
    from types import SimpleNamespace

    from tests.gpu.make_model import SHAPES

    config = SimpleNamespace(**SHAPES["4b"][1])
    batch = SimpleNamespace(total_lengths=[2048] * 16, response_lengths=[2048] * 16)
    weights, attention = 4.02e9, 36 * 32 * 128 * 2048
    assert train_step.operations(config, batch) == pytest.approx(6 * 32768 * (weights + attention), rel=0.01)
