"""Weights that follow the KL and the entropy, against the formulas in float64 written out here."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.objective.adaptive import Coefficients
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.types.metrics import Metric

NUMBERS = st.floats(-3, 3, allow_nan=False)
STEPS = st.lists(st.tuples(NUMBERS, st.integers(1, 64)), min_size=1, max_size=30)


def kl_flags(in_loss, start=0.1, target=0.2, horizon=50.0):
    where = {"use_kl_loss": True, "kl_loss_coef": start} if in_loss else {"kl_coef": start}
    estimator = "grpo" if in_loss else "reinforce_plus_plus"
    return LossArguments(advantage_estimator=estimator, kl_target=target, kl_horizon=horizon, **where)


@pytest.mark.parametrize("in_loss", [False, True])
@given(steps=STEPS)
def test_the_weight_of_the_kl_follows_the_controller_of_ziegler(in_loss, steps):
    coefficients = Coefficients(kl_flags(in_loss))
    field, metric = ("kl_loss_coef", "train/kl_loss") if in_loss else ("kl_coef", "train/reward_kl")
    beta = 0.1
    for kl, trajectories in steps:
        assert getattr(coefficients.loss, field) == pytest.approx(beta, rel=DOUBLE_ERROR)
        coefficients.follow({metric: Metric(kl * 7, 7.0)}, trajectories)
        ratio = kl / 0.2
        e = -0.2 if ratio < 0.8 else 0.2 if ratio > 1.2 else ratio - 1.0
        beta += beta * e * trajectories / 50.0
    assert coefficients.metrics() == {f"train/{field}": Metric(getattr(coefficients.loss, field))}
    assert getattr(coefficients.loss, field) == pytest.approx(beta, rel=DOUBLE_ERROR)


@given(entropies=st.lists(st.floats(0, 1), min_size=1, max_size=40), start=st.sampled_from([0.0, 0.02, 0.05]))
def test_the_weight_of_the_entropy_follows_skywork(entropies, start):
    """c moves by delta within its bounds, and is used only after a step whose entropy was at the target or below."""
    flags = LossArguments(
        entropy_target=0.4, entropy_coef=start, entropy_coef_delta=0.01, entropy_coef_min=0.0, entropy_coef_max=0.05
    )
    coefficients = Coefficients(flags)
    assert coefficients.loss.entropy_coef == start
    c = start
    for entropy in entropies:
        coefficients.follow({"train/entropy_loss": Metric(entropy)}, 8)
        c = max(0.0, min(0.05, c + 0.01 if entropy <= 0.4 else c - 0.01))
        assert coefficients.loss.entropy_coef == pytest.approx(c if entropy <= 0.4 else 0.0, abs=DOUBLE_ERROR)


@given(steps=STEPS, cut=st.integers(0, 30))
def test_a_resumed_run_continues_exactly(steps, cut):
    """The state passes through JSON, as in a checkpoint."""
    flags = LossArguments(
        use_kl_loss=True, kl_loss_coef=0.3, kl_target=0.1, kl_horizon=40.0, entropy_target=0.5, entropy_coef=0.01
    )

    def follow(coefficients, part):
        for number, trajectories in part:
            metrics = {"train/kl_loss": Metric(number), "train/entropy_loss": Metric(abs(number))}
            coefficients.follow(metrics, trajectories)

    whole, first, second = (Coefficients(flags) for _ in range(3))
    follow(whole, steps)
    follow(first, steps[:cut])
    second.restore(json.loads(json.dumps(first.state())))
    assert second.loss == first.loss
    follow(second, steps[cut:])
    assert second.loss == whole.loss


def test_a_step_without_loss_tokens_changes_nothing():
    flags = LossArguments(use_kl_loss=True, kl_loss_coef=0.3, kl_target=0.1, entropy_target=0.5)
    coefficients = Coefficients(flags)
    before = coefficients.loss
    coefficients.follow({"train/skipped_steps": Metric(1.0)}, 8)
    assert coefficients.loss == before


def test_fixed_weights_have_no_state_and_no_metrics():
    given_flags = LossArguments(use_kl_loss=True, kl_loss_coef=0.3, entropy_coef=0.1)
    coefficients = Coefficients(given_flags)
    assert not coefficients.adapt and coefficients.loss is given_flags
    assert coefficients.state() == {} and coefficients.metrics() == {}


def test_samples_without_advantage_are_trained_on_under_an_entropy_target():
    """The weight may be 0 when the batch is built, and not when it is trained on."""
    assert not build_objective(LossArguments()).zero_advantage_has_gradient
    assert build_objective(LossArguments(entropy_target=0.2)).zero_advantage_has_gradient
