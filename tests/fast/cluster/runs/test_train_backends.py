"""The same greedy run on both training backends has the same metrics, also across a change of layout."""

import pytest

# Greedy answers depend only on the weights. Rewards are not normalized, as equal answers have no group statistics.
FLAGS = ["--num-rollout", "2", "--lr", "1e-4", "--lr-decay-style", "constant", "--rollout-temperature", "0"]
FLAGS += ["--disable-rewards-normalization", "--use-kl-loss", "--kl-loss-coef", "0.1"]
MEGATRON = ["--train-backend", "megatron"]
STEPS = 2  # optimizer steps per iteration


@pytest.fixture(scope="module")
def fsdp(launch):
    return launch("fsdp", *FLAGS)


@pytest.fixture(scope="module")
def tensor_parallel(launch, workplace):
    """Run the first iteration and save a checkpoint."""
    saving = ["--save", str(workplace / "megatron_checkpoints"), "--num-rollout", "1"]
    return launch("tp2", *FLAGS, *MEGATRON, *saving, "--tensor-model-parallel-size", "2", ranks=2)


@pytest.fixture(scope="module")
def pipeline_parallel(launch, workplace, tensor_parallel):
    """Run the second iteration from that checkpoint on padded rows, and export the model."""
    assert tensor_parallel.wait() == 0, tensor_parallel.err
    going_on = ["--load", str(workplace / "megatron_checkpoints"), "--save-hf", str(workplace / "megatron_hf")]
    padded = ["--pipeline-model-parallel-size", "2", "--qkv-format", "bshd"]
    run = launch("pp2", *FLAGS, *MEGATRON, *going_on, *padded, ranks=2)
    assert run.wait() == 0, run.err
    return run


@pytest.mark.timeout(900)
def test_steps_agree(fsdp, tensor_parallel, pipeline_parallel):
    """Tensor parallelism in iteration 1; then pipeline parallelism and padding, from that checkpoint."""
    assert fsdp.wait() == 0, fsdp.err
    found, wanted = tensor_parallel.rows() | pipeline_parallel.rows(), fsdp.rows()
    assert sorted(found) == sorted(wanted) == [1, 2, 3, 4]
    for step in wanted:
        names = {name for name in wanted[step] if name.startswith(("train/", "rollout/"))} - {"train/loss_mass"}
        assert names == {name for name in found[step] if name.startswith(("train/", "rollout/"))} - {"train/loss_mass"}
        for name in names:
            assert found[step][name] == pytest.approx(wanted[step][name], rel=1e-4, abs=1e-5), (step, name)
    assert wanted[3]["train/kl_loss"] > 0 and wanted[4]["train/grad_norm"] > 0
    assert tensor_parallel.rows()[1]["train/loss_mass"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.timeout(900)
def test_export_is_the_trained_model(pipeline_parallel, workplace, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(workplace / "megatron_hf").named_parameters())
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in before)
    assert pipeline_parallel.none_left() and pipeline_parallel.said() == []


@pytest.mark.slow
def test_checkpoint_of_the_other_backend_is_refused(launch, pipeline_parallel, workplace):
    run = launch("other", *FLAGS, "--load", str(workplace / "megatron_checkpoints"))
    assert run.wait() == 1
    assert run.err.startswith("train.py: error: --load: the checkpoint iter_0000001 was written by --train-backend meg")
