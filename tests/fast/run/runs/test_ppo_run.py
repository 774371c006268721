"""A PPO run: one iteration of the critic alone, then both. ``test_resume_exactly`` resumes such a run."""

import math

import pytest
from tolerance import METRIC_ERROR, RELATIVE_ERROR, RUN_ERROR, RUN_METRIC_ERROR

from tests.fast.run.runs.launches import ONE_PROCESS

PPO = ["--advantage-estimator", "ppo", "--normalize-advantages", "--lambd", "0.95", "--kl-coef", "0.01"]
CRITIC = ["--critic-lr", "3e-3", "--num-critic-only-steps", "1"]
OF_CRITIC = {"value_loss", "value_clipfrac", "values", "returns", "advantages", "reward_kl", "critic_grad_norm"}
OF_POLICY = {"pg_loss", "ppo_kl", "grad_norm", "lr"}


def of_training(row):
    return {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}


@pytest.fixture(scope="module")
def whole(launch):
    """Run without Ray, which changes no metric."""
    run = launch("ppo", *PPO, *CRITIC, "--num-rollout", "3", program=ONE_PROCESS)
    assert run.wait() == 0, run.err
    return run


def test_the_critic_learns_first_then_both(whole):
    steps = {step: of_training(row) for step, row in whole.rows().items()}
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert all(row.keys() >= OF_CRITIC for row in steps.values())
    assert all(math.isfinite(value) for row in steps.values() for value in row.values())
    assert [step for step, row in steps.items() if row.keys() >= OF_POLICY] == [3, 4, 5, 6]
    assert not OF_POLICY & steps[2].keys()
    assert steps[3]["loss_mass"] == pytest.approx(1, rel=RELATIVE_ERROR), "the canary watches the policy's first step"
    assert steps[3]["lr"] == pytest.approx(1e-3), "its schedule starts with this step"
    assert steps[1]["reward_kl"] == steps[2]["reward_kl"] == pytest.approx(0, abs=METRIC_ERROR)
    assert abs(steps[5]["reward_kl"]) > 10 * METRIC_ERROR, "the policy has moved"


@pytest.mark.slow
def test_megatron_takes_the_same_steps(whole, launch):
    """With tensor parallelism, the first iteration has the same answers and the same steps of critic and policy."""
    flags = ["--num-rollout", "3", "--train-backend", "megatron", "--tensor-model-parallel-size", "2"]
    run = launch("ppo_megatron", *PPO, *CRITIC, *flags, ranks=2)
    assert run.wait() == 0, run.err
    for step in (1, 2):
        metrics, wanted = of_training(run.rows()[step]), of_training(whole.rows()[step])
        assert metrics.keys() == wanted.keys()
        assert metrics == pytest.approx(wanted, rel=RUN_ERROR, abs=RUN_METRIC_ERROR), step
