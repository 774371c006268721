"""The same greedy run on both training backends has the same metrics, in the slow tests across a change of layout."""

import pytest
from tolerance import RELATIVE_ERROR, RUN_ERROR, RUN_METRIC_ERROR

from tests.fast.run.runs.launches import ONE_PROCESS

# Greedy answers depend only on the weights. Rewards are not normalized, as equal answers have no group statistics.
FLAGS = ["--num-rollout", "2", "--lr", "1e-4", "--lr-decay-style", "constant", "--rollout-temperature", "0"]
FLAGS += ["--disable-rewards-normalization", "--use-kl-loss", "--kl-loss-coef", "0.1"]
MEGATRON = ["--train-backend", "megatron"]


@pytest.fixture(scope="module")
def fsdp(launch):
    """Run without Ray, which changes no metric."""
    run = launch("fsdp", *FLAGS, program=ONE_PROCESS)
    assert run.wait() == 0, run.err
    return run


@pytest.fixture(scope="module")
def megatron(launch, workplace):
    """Run with tensor parallelism, save a checkpoint of each iteration, and export the model."""
    saving = ["--save", str(workplace / "megatron_checkpoints"), "--save-interval", "1"]
    saving += ["--save-hf", str(workplace / "megatron_hf")]
    run = launch("tp2", *FLAGS, *MEGATRON, *saving, "--tensor-model-parallel-size", "2", ranks=2)
    assert run.wait() == 0, run.err
    return run


def assert_same(actual, wanted, steps):
    """Compare the metrics of training and rollouts in these steps, which are all that ``actual`` has."""
    assert sorted(actual) == steps
    for step in steps:
        names = {name for name in wanted[step] if name.startswith(("train/", "rollout/"))} - {"train/loss_mass"}
        assert names == {name for name in actual[step] if name.startswith(("train/", "rollout/"))} - {"train/loss_mass"}
        for name in names:
            expected = pytest.approx(wanted[step][name], rel=RUN_ERROR, abs=RUN_METRIC_ERROR)
            assert actual[step][name] == expected, (step, name)


@pytest.mark.timeout(900)
def test_steps_agree(fsdp, megatron):
    rows = fsdp.rows()
    assert_same(megatron.rows(), rows, [1, 2, 3, 4])
    assert rows[3]["train/kl_loss"] > 0 and rows[4]["train/grad_norm"] > 0
    assert megatron.rows()[1]["train/loss_mass"] == pytest.approx(1.0, rel=RELATIVE_ERROR)


def test_export_is_the_trained_model(megatron, workplace, tiny_model):
    import torch
    from transformers import AutoModelForCausalLM

    before = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    after = dict(AutoModelForCausalLM.from_pretrained(workplace / "megatron_hf").named_parameters())
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before)
    # Four steps, each of at most about the learning rate, 1e-4.
    assert all(torch.allclose(before[name], after[name], atol=1e-3) for name in before)
    assert megatron.none_left() and megatron.said() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_continues_in_another_layout(fsdp, megatron, launch, workplace):
    """Run the second iteration with pipeline parallelism, on padded rows."""
    going_on = ["--load", str(workplace / "megatron_checkpoints" / "iter_0000001")]
    padded = ["--pipeline-model-parallel-size", "2", "--qkv-format", "bshd"]
    run = launch("pp2", *FLAGS, *MEGATRON, *going_on, *padded, ranks=2)
    assert run.wait() == 0, run.err
    assert_same(run.rows(), fsdp.rows(), [3, 4])


@pytest.mark.slow
def test_checkpoint_of_the_other_backend_is_refused(launch, megatron, workplace):
    folder = workplace / "megatron_checkpoints" / "iter_0000001"
    run = launch("other", *FLAGS, "--load", str(folder))
    written = f"--load {folder}: the checkpoint iter_0000001 was written by --train-backend megatron"
    assert run.wait() == 1 and run.err.startswith(f"train.py: error: {written}")
