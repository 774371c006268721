"""A PPO run: one iteration of the critic alone, then both, until Ctrl-C; and the same run resumed from a checkpoint."""

import math

import pytest
from tolerance import METRIC_ERROR, RELATIVE_ERROR, RUN_ERROR, RUN_METRIC_ERROR

PPO = ["--advantage-estimator", "ppo", "--normalize-advantages", "--lambd", "0.95", "--kl-coef", "0.01"]
CRITIC = ["--critic-lr", "3e-3", "--num-critic-only-steps", "1"]
OF_CRITIC = {"value_loss", "value_clipfrac", "values", "returns", "advantages", "reward_kl", "critic_grad_norm"}
OF_POLICY = {"pg_loss", "ppo_kl", "grad_norm", "lr"}


def of_training(row):
    return {name.removeprefix("train/"): value for name, value in row.items() if name.startswith("train/")}


@pytest.fixture(scope="module")
def whole(launch, workplace):
    """Interrupt the run during a call of a reward function that does not return, after three iterations."""
    held = workplace / "ppo.held"
    save = ["--save", str(workplace / "ppo"), "--save-interval", "2"]
    run = launch("ppo", *PPO, *CRITIC, *save, HOLD_AT="3", HELD=str(held))
    run.wait_until(lambda: held.exists() and 6 in run.rows())
    run.interrupt()
    run.wait()
    return run


def test_ctrl_c_says_how_to_resume(whole):
    assert whole.process.returncode == 130, whole.err
    assert whole.err.splitlines()[-1].startswith("stopped by the user; the same command with --load")
    assert "Traceback" not in whole.err
    assert whole.none_left()


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
def test_a_resumed_run_restores_its_critic(whole, launch, workplace):
    checkpoint = workplace / "ppo_first"
    checkpoint.mkdir()
    (workplace / "ppo" / "iter_0000002").rename(checkpoint / "iter_0000002")
    run = launch("ppo_on", *PPO, *CRITIC, "--load", str(checkpoint))
    assert run.wait() == 0, run.err
    expected = whole.rows()
    for step in (5, 6):
        metrics = {name: v for name, v in of_training(run.rows()[step]).items() if name != "loss_mass"}
        wanted = {name: of_training(expected[step])[name] for name in metrics}
        assert metrics == pytest.approx(wanted, rel=RELATIVE_ERROR, abs=METRIC_ERROR)


@pytest.mark.slow
def test_megatron_takes_the_same_steps(whole, launch):
    """With tensor parallelism, the first iteration has the same answers and the same steps of critic and policy."""
    flags = ["--train-backend", "megatron", "--tensor-model-parallel-size", "2"]
    run = launch("ppo_megatron", *PPO, *CRITIC, *flags, ranks=2)
    assert run.wait() == 0, run.err
    for step in (1, 2):
        metrics, wanted = of_training(run.rows()[step]), of_training(whole.rows()[step])
        assert metrics.keys() == wanted.keys()
        assert metrics == pytest.approx(wanted, rel=RUN_ERROR, abs=RUN_METRIC_ERROR), step
