"""GMPO's losses against 2507.20673, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments


def gmpo(eps):
    def loss(p, old, a):
        sign = 1.0 if a > 0 else -1.0
        ratio = (p - old).exp()
        clipped = ratio.clamp(torch.tensor(-eps).exp().item(), torch.tensor(eps).exp().item())
        # The paper's min(rho^sgn A, clip(rho)^sgn A)^sgn A, then the geometric mean.
        minima = torch.minimum(sign * ratio.log(), sign * clipped.log()) * sign
        return -a * minima.exp().prod() ** (1 / len(p))

    return loss


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("eps", [0.4, 0.05])
def test_loss_and_gradient(off_policy, gradient_of, seed, eps):
    case = off_policy(seed)
    loss, gradient, metrics = gradient_of(
        LossArguments(policy_loss="geo_mean", geo_mean_log_clip=eps), case.micro, case.log_probs
    )
    expected_loss, expected = case.expected(gmpo(eps))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


def test_only_the_clipped_token_loses_its_gradient(make_micro, gradient_of):
    micro = make_micro([[1, 1]], old_log_probs=torch.tensor([-3.0, -1.0]))
    loss, gradient, metrics = gradient_of(LossArguments(policy_loss="geo_mean"), micro, [-1.0, -1.0])
    mean = torch.tensor(0.2).exp().item()  # of log ratios 2, cut to 0.4, and 0
    assert loss == pytest.approx(-mean) and metrics["pg_clipfrac"].item() == 0.5
    assert gradient.tolist() == pytest.approx([0.0, -mean / 2])


def test_the_other_side_is_not_clipped(make_micro, gradient_of):
    micro = make_micro([[1]], old_log_probs=torch.tensor([-1.0]))
    _, gradient, metrics = gradient_of(LossArguments(policy_loss="geo_mean"), micro, [-3.0])
    assert gradient.item() == pytest.approx(-torch.tensor(-2.0).exp().item()) and metrics["pg_clipfrac"].item() == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss geo_mean --geo-mean-log-clip 0", "--geo-mean-log-clip 0.0: .*above 0"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss geo_mean".split()))
    text = explain(validated)
    assert "-A exp(mean of d over the sequence)" in text
    assert "at most 0.4 if A > 0, at least -0.4 if A < 0" in text
    assert any("--geo-mean-log-clip" in line for line in without_effect(validated.settings))
