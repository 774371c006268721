"""SAPO's token losses against 2511.20347, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments

SEEDS = range(8)


def sapo(tau_pos, tau_neg):
    def loss(p, old, a):
        ratio, tau = (p - old).exp(), tau_pos if a > 0 else tau_neg
        return -(4 / tau / (1 + (-tau * (ratio - 1)).exp()) * a).mean()

    return loss


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("pos", "neg"), [(1.0, 1.05), (4.0, 0.5)])
def test_loss_and_gradient(off_policy, gradient_of, seed, pos, neg):
    case = off_policy(seed)
    loss, gradient, metrics = gradient_of(
        LossArguments(policy_loss="sapo", sapo_tau_pos=pos, sapo_tau_neg=neg), case.micro, case.log_probs
    )
    expected_loss, expected = case.expected(sapo(pos, neg))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
    assert "pg_clipfrac" not in metrics


def test_the_gate_closes_on_both_sides(make_micro, gradient_of):
    """Away from a ratio of 1 the weight of the score function, gradient / (-ratio A), falls."""
    log_ratios = [-3.0, -1.0, 0.0, 1.0, 2.0]
    micro = make_micro([[1] * 5], old_log_probs=torch.tensor([-4.0 - r for r in log_ratios]))
    _, gradient, _ = gradient_of(LossArguments(policy_loss="sapo", sapo_tau_pos=2.0), micro, [-4.0] * 5)
    weights = -5 * gradient / torch.tensor(log_ratios).double().exp()
    assert weights[2].item() == pytest.approx(1.0) and weights.argmax() == 2
    assert weights[0] < weights[1] < 1 and weights[4] < weights[3] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss sapo --sapo-tau-pos 0", "--sapo-tau-pos 0.0: .*above 0"),
        ("--policy-loss sapo --sapo-tau-neg nan", "--sapo-tau-neg nan: .*above 0"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss sapo".split()))
    text = explain(validated)
    assert "-(4 / τ) sigmoid(τ (ρ - 1)) A" in text and "τ = 1 if A > 0, else 1.05" in text
    assert any("--sapo-tau-pos" in line for line in without_effect(validated.settings))
