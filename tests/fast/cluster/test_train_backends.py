"""The same run on both training backends: the metrics of the first steps agree, and both export a model."""

import pytest

# Equal weights and seeds give equal answers in the first rollout; from the second on, rounding may change a token.
FLAGS = ["--num-rollout", "2", "--lr", "1e-4", "--use-kl-loss", "--kl-loss-coef", "0.1"]
COMPARED = ("train/pg_loss", "train/kl_loss", "train/entropy_loss", "train/grad_norm", "train/lr")
MEGATRON = ["--train-backend", "megatron"]


@pytest.fixture(scope="module")
def fsdp(launch):
    run = launch("fsdp", *FLAGS)
    assert run.wait() == 0, run.err
    return run


@pytest.mark.parametrize("split", ["tensor-model-parallel-size", "pipeline-model-parallel-size"])
def test_first_steps_agree(launch, workplace, fsdp, split):
    run = launch(split, *FLAGS, *MEGATRON, f"--{split}", "2", "--save-hf", str(workplace / split), ranks=2)
    assert run.wait() == 0, run.err
    for step in (1, 2):
        found, wanted = run.rows()[step], fsdp.rows()[step]
        assert {name for name in found if name.startswith("train/")} == {n for n in wanted if n.startswith("train/")}
        for name in COMPARED:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-5), (step, name)
    assert (workplace / split / "config.json").is_file()
