"""LUSPO's losses against 2602.05261, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments


def luspo(low, high):
    def loss(p, old, a):
        ratio = (p - old).mean().exp()
        return -len(p) * torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)

    return loss


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.01, 0.5)])
def test_loss_and_gradient(off_policy, gradient_of, seed, low, high):
    case = off_policy(seed)
    loss, gradient, metrics = gradient_of(
        LossArguments(policy_loss="luspo", eps_clip=low, eps_clip_high=high), case.micro, case.log_probs
    )
    expected_loss, expected = case.expected(luspo(low, high))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


def test_every_token_weighs_alike_whatever_the_length(make_micro, gradient_of):
    micro = make_micro([[1, 1, 1, 1], [1], [1, 0, 1]])
    log_probs = [-1.0] * 8
    _, gradient, _ = gradient_of(LossArguments(policy_loss="luspo"), micro, log_probs)
    assert gradient.tolist() == pytest.approx([-1 / 3] * 6 + [0.0, -1 / 3])
    _, gradient, _ = gradient_of(LossArguments(policy_loss="gspo"), micro, log_probs)
    assert gradient[0].item() == pytest.approx(gradient[4].item() / 4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss luspo --eps-clip 0", r"--eps-clip 0.0: must be in \(0, 1\]"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss luspo".split()))
    text = explain(validated)
    assert "|y_i| max(-ρ A, -clip(ρ, 0.8, 1.2) A)" in text and "geometric mean over the sequence" in text
    assert any("clip range" in line for line in without_effect(validated.settings))
