"""A resumed run is the run that was never stopped: prompts, samples, metrics, weights and optimizer, bit for bit.

Only the first step of a run is watched by the canary, so a resumed run has ``train/loss_mass`` once more.
"""

import json
import shutil

import pytest
from vision_models import image_flags

from miles.training.checkpoint_files import read_manifest
from tests.fast.run.runs.launches import trained

STEPS, SAVED, ALL = 2, 2, 4  # optimizer steps per iteration; iterations when it is saved, and of the whole run
SAME = ["--num-rollout", str(ALL), "--save-interval", str(SAVED), "--lr", "1e-3"]
MEGATRON = ["--train-backend", "megatron"]
CASES = {
    "fsdp": [],
    "megatron": [*MEGATRON, "--tensor-model-parallel-size", "2", "--bf16", "--use-distributed-optimizer"],
    "moe": [*MEGATRON, "--expert-model-parallel-size", "2"],
    "images": ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "200"],
    "ppo": ["--advantage-estimator", "ppo", "--normalize-advantages", "--lambd", "0.95", "--kl-coef", "0.01"]
    + ["--critic-lr", "3e-3", "--num-critic-only-steps", "1"],
}


@pytest.fixture(scope="module")
def moe_model(tiny_model, tmp_path_factory):
    """Return a folder with a random mixture of experts and the tokenizer of ``tiny_model``."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("moe") / "model"
    shutil.copytree(tiny_model, folder)
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    tiny = AutoConfig.from_pretrained(tiny_model)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=tiny.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        eos_token_id=tiny.eos_token_id,
        pad_token_id=tiny.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Return the flags of a model and of rows with images."""
    return image_flags(tmp_path_factory.mktemp("images"))


def flags_of(case, moe_model, images):
    return [*CASES[case], *{"moe": ["--hf-checkpoint", str(moe_model)], "images": images}.get(case, [])]


def run_and_resume(launch, workplace, name, *flags):
    """Run to the end with a checkpoint in between, then again from that checkpoint into other folders."""
    whole_folder, resumed_folder = workplace / f"{name}_whole", workplace / f"{name}_resumed"

    def start(folder, *more):
        save_flags = ["--save", str(folder), "--save-debug-rollout-data", str(folder) + "_{iteration}.jsonl"]
        run = launch(f"{folder.name}_run", *SAME, *flags, *save_flags, *more, ranks=2)
        assert run.wait() == 0, run.err
        return run

    whole = start(whole_folder)
    resumed = start(resumed_folder, "--load", str(whole_folder / f"iter_{SAVED:07d}"))
    assert f"iter_{SAVED:07d} is complete (" in resumed.out
    return (whole, whole_folder), (resumed, resumed_folder)


def samples(folder, iteration):
    return [json.loads(line) for line in folder.with_name(f"{folder.name}_{iteration}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_run_that_was_not_stopped(launch, workplace, moe_model, images, case):
    flags = flags_of(case, moe_model, images)
    (whole, folder), (resumed, other) = run_and_resume(launch, workplace, f"{case}_exactly", *flags)
    for iteration in range(SAVED, ALL):
        assert samples(other, iteration) == samples(folder, iteration), iteration
    rows, wanted = resumed.rows(), whole.rows()
    assert sorted(rows) == list(range(SAVED * STEPS + 1, ALL * STEPS + 1))
    for step, row in rows.items():
        assert trained(row) == trained(wanted[step]), step
    last = f"iter_{ALL:07d}"
    found_files, wanted_files = read_manifest(other / last), read_manifest(folder / last)
    tensors = [name for name in wanted_files if name.endswith((".distcp", ".pt"))]
    assert len(tensors) >= 4  # of two ranks, and their random states
    assert {name: found_files[name] for name in tensors} == {name: wanted_files[name] for name in tensors}
