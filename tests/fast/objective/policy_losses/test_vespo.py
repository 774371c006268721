"""VESPO's losses against 2602.10693, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments


def vespo(positive, negative):
    def loss(p, old, a):
        c1, c2 = negative if a < 0 else positive
        w = ((p.exp() / old.exp()).prod()).detach()
        return -(w**c1 * torch.exp(c2 * (1 - w)) * a * p).mean()

    return loss


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient(off_policy, gradient_of, seed):
    case = off_policy(seed)
    flags = LossArguments(policy_loss="vespo")
    loss, gradient, metrics = gradient_of(flags, case.micro, case.log_probs)
    expected_loss, expected = case.expected(vespo((2.0, 3.0), (3.0, 2.0)))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
    assert "pg_clipfrac" not in metrics


@pytest.mark.parametrize("seed", range(4))
def test_its_flags(off_policy, gradient_of, seed):
    case = off_policy(seed)
    flags = dict(vespo_power_pos=1.0, vespo_decay_pos=0.5, vespo_power_neg=1.5, vespo_decay_neg=4.0)
    _, gradient, _ = gradient_of(LossArguments(policy_loss="vespo", **flags), case.micro, case.log_probs)
    _, expected = case.expected(vespo((1.0, 0.5), (1.5, 4.0)))
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


@pytest.mark.parametrize("shift", [-200.0, 5.0, 200.0])
def test_a_sequence_far_from_its_policy_has_no_gradient(make_micro, gradient_of, shift):
    micro = make_micro([[1, 1]], old_log_probs=torch.tensor([-300.0 - shift] * 2))
    _, gradient, _ = gradient_of(LossArguments(policy_loss="vespo"), micro, [-300.0] * 2)
    assert gradient.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss vespo --vespo-decay-pos 0", "--vespo-decay-pos 0.0: .*above 0"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss vespo".split()))
    text = explain(validated)
    assert "φ = W^c1 exp(c2 (1 - W))" in text and "(c1, c2) = (3, 2) if A < 0, else (2, 3)" in text
    assert any("--policy-loss vespo" in line for line in without_effect(validated.settings))
