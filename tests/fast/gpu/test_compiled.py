"""Which functions a training step of Megatron would compile on a GPU: none, but for the fused SwiGLU of tests/gpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.make_model import write_model
from tests.gpu.tiny_families import write_family

REPO = Path(__file__).resolve().parents[3]
FLAGS = "--device cpu --backend megatron --micro-tokens 64 --micro-batches 1 --sample-tokens 32 --warm-up 0 --steps 1"
# On CPU the backend imports Megatron with this function instead of torch.compile.
RAISING = """
import sys
from miles.training.megatron import cpu_support

def raising(function=None, **_):
    def call(*_, **__):
        raise AssertionError(f"would be compiled: {function.__name__}")
    return raising if function is None else call

cpu_support._as_written = raising
from tests.gpu import train_step
train_step.main()
"""


def step(model, tmp_path, *more):
    words = [sys.executable, "-c", RAISING, str(model), str(tmp_path / "step.json"), *FLAGS.split(), *more]
    environ = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=REPO, env=environ, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dense_step_calls_no_function_that_a_gpu_compiles(tmp_path):
    status, said = step(write_model(tmp_path, small=True), tmp_path)
    assert status == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_with_experts_calls_none_either(tmp_path):
    write_family("qwen3_moe", tmp_path / "model", seed=1)
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 =", "label": "2"}\n')
    status, said = step(tmp_path / "model", tmp_path)
    assert status == 0, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_fused_swiglu_is_compiled(tmp_path):
    status, said = step(write_model(tmp_path, small=True), tmp_path, "--fused")
    assert status == 1 and "would be compiled: swiglu" in said, said
