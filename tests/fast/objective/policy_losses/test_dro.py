"""DRO's losses against 2405.19107 and 2501.12599, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments


def dro(beta, level):
    def loss(p, old, a):
        penalty = (p - old).sum() ** 2 if level == "sequence" else ((p - old) ** 2).sum()
        return (-a * p.sum() + beta / 2 * penalty) / len(p)

    return loss


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_loss_and_gradient(off_policy, gradient_of, seed, level):
    case = off_policy(seed)
    loss, gradient, metrics = gradient_of(
        LossArguments(policy_loss="dro", dro_beta=0.3, dro_level=level), case.micro, case.log_probs
    )
    expected_loss, expected = case.expected(dro(0.3, level))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
    assert "pg_clipfrac" not in metrics


@pytest.mark.parametrize("level", ["sequence", "token"])
def test_a_sample_without_advantage_is_pulled_back_and_is_trained_on(make_micro, gradient_of, level):
    loss = LossArguments(policy_loss="dro", dro_beta=0.5, dro_level=level)
    micro = make_micro([[1, 1]], old_log_probs=torch.tensor([-1.0, -1.0]), advantages=torch.zeros(2))
    _, gradient, _ = gradient_of(loss, micro, [-2.0, -1.0])
    assert gradient.tolist() == pytest.approx([-0.25, -0.25 if level == "sequence" else 0.0])
    assert build_objective(loss).samples_with_gradient([0.0, 1.0]) == [True, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss dro --dro-beta 0", "--dro-beta 0.0: .*above 0"),
        ("--policy-loss dro --dro-level group", "--dro-level"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss dro".split()))
    text = explain(validated)
    assert "-A log p, and 0.025 (Σ over the sequence of log p - log p_old)²" in text
    assert any("--dro-beta" in line for line in without_effect(validated.settings))
