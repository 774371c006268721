"""Test ``--rollout-engine sglang`` on GPUs: NCCL broadcast, weight sync to a colocated engine, shared memory.

The tests need SGLang's own GPU environment, and torch-memory-saver for the colocated runs.
"""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.fast.conftest import byte_tokenizer
from tests.gpu.run_checks import engine_against_trainer

pytestmark = pytest.mark.timeout(1800)

FLAGS = ["--device", "cuda", "--rollout-engine", "sglang", "--bf16", "--num-rollout", "3"]
CHECKED = ["--check-weight-update-equal"]


def assert_learns(run):
    rows = run.rows()
    assert sorted(rows) == list(range(1, 7))
    assert all(row["train/grad_norm"] > 0 for row in rows.values())
    # In bf16, compare in the first step of each iteration, before the trainer's weights change.
    assert all(rows[step]["train/train_rollout_logprob_abs_diff"] < 0.05 for step in (1, 3, 5))


@pytest.mark.gpus(2)
@pytest.mark.parametrize("mode", ["broadcast", "disk", "ipc"])
def test_weights_reach_an_engine_on_another_gpu(launch, mode):
    run = launch(f"apart_{mode}", *FLAGS, *CHECKED, "--update-weight-transfer-mode", mode)
    assert run.wait() == 0, run.err
    assert_learns(run)
    log = (run.output / "engines" / "engine_0.log").read_text()
    assert ("backend=nccl" in log) is (mode == "broadcast")


@pytest.mark.gpus(3)
def test_broadcast_to_an_engine_of_two_gpus(launch):
    devices = ["--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "2"]
    run = launch("tensor_parallel", *FLAGS, *CHECKED, *devices)
    assert run.wait() == 0, run.err
    assert_learns(run)


@pytest.mark.parametrize("mode", ["broadcast", "ipc"])
def test_trainer_and_engine_take_turns_on_one_gpu(launch, mode, record_property):
    """The engine takes most of the memory, so the trainer only fits while the engine has released it."""
    claim = ["--colocate", "--offload-train", "--offload-rollout", "--sglang-mem-fraction-static", "0.85"]
    run = launch(f"turns_{mode}", *FLAGS, *CHECKED, *claim, "--update-weight-transfer-mode", mode)
    assert run.wait() == 0, run.err
    assert_learns(run)
    log = (run.output / "engines" / "engine_0.log").read_text()
    record_property("figures", json.dumps({"engine - trainer": engine_against_trainer(run.output)}))
    assert log.count("POST /release_memory_occupation") == 4  # before the trainer is built, and after each iteration
    assert log.count("POST /resume_memory_occupation") == 8  # weights and cache, per update


def test_checkpoint_of_a_trainer_that_takes_turns(launch, workplace):
    saving = ["--colocate", "--save", str(workplace / "turns"), "--save-interval", "1"]
    assert launch("saved", *FLAGS, *saving).wait() == 0
    resumed = launch("saved", *FLAGS, *saving, "--load", str(workplace / "turns"), "--num-rollout", "4")
    assert resumed.wait() == 0, resumed.err
    assert sorted(resumed.rows()) == list(range(1, 9))


@pytest.mark.gpus(2)
def test_engine_that_dies_during_a_broadcast_does_not_hang_the_sender(launch):
    """As in tests/fast/run/runs/test_kills.py, but the update only ends if NCCL is aborted."""
    run = launch("killed", *FLAGS, "--use-fault-tolerance", "--num-rollout", "6")
    run.wait_until(lambda: run.has_rows() and max(run.rows()) >= 2)
    [scheduler, *_] = [p for p in run.left() if "sglang::scheduler" in " ".join(p.cmdline())]
    scheduler.kill()
    assert run.wait() == 0, run.err
    assert sorted(run.rows()) == list(range(1, 13))


@pytest.mark.gpus(2)
def test_the_support_of_sampling_is_replayed(launch):
    """Without it the difference would be the logarithm of what top-p and top-k keep."""
    run = launch("support", *FLAGS, "--rollout-top-p", "0.8", "--rollout-top-k", "64")
    assert run.wait() == 0, run.err
    assert_learns(run)


@pytest.mark.gpus(2)
def test_the_experts_of_the_servers_are_replayed(launch, tmp_path):
    tokenizer = byte_tokenizer()
    shape = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, head_dim=64)
    experts = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, norm_topk_prob=True)
    ends = dict(bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=1024, num_key_value_heads=2, **shape, **experts, **ends)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    run = launch("experts", *FLAGS, "--hf-checkpoint", str(tmp_path), "--use-rollout-routing-replay")
    assert run.wait() == 0, run.err
    assert_learns(run)
