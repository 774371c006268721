"""DPPO's two trust regions against 2602.04879, by automatic differentiation of the formula in float64."""

from __future__ import annotations

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments


def dppo(divergence, delta):
    def loss(p, old, a):
        ratio = (p - old).exp()
        outside = divergence(p.exp(), old.exp()).detach() > delta
        masked = outside & ((ratio > 1) if a > 0 else (ratio < 1))
        return -(ratio * a * ~masked).mean()

    return loss


def total_variation(p, old):
    return 0.5 * ((p - old).abs() + ((1 - p) - (1 - old)).abs())


def binary_kl(p, old):
    return old * (old / p).log() + (1 - old) * ((1 - old) / (1 - p)).log()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("flags", "divergence", "delta"),
    [
        ({"policy_loss": "dppo_tv", "dppo_tv_delta": 0.15}, total_variation, 0.15),
        ({"policy_loss": "dppo_tv", "dppo_tv_delta": 0.02}, total_variation, 0.02),
        ({"policy_loss": "dppo_kl", "dppo_kl_delta": 0.05}, binary_kl, 0.05),
        ({"policy_loss": "dppo_kl", "dppo_kl_delta": 0.005}, binary_kl, 0.005),
    ],
)
def test_loss_and_gradient(off_policy, gradient_of, seed, flags, divergence, delta):
    case = off_policy(seed)
    loss, gradient, metrics = gradient_of(LossArguments(**flags), case.micro, case.log_probs)
    expected_loss, expected = case.expected(dppo(divergence, delta))
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0.7, 1.1, 20.0])
@pytest.mark.parametrize(("name", "divergence", "delta"), [("tv", total_variation, 0.15), ("kl", binary_kl, 0.05)])
def test_loss_and_gradient_with_a_bounded_ratio(off_policy, gradient_of, seed, bound, name, divergence, delta):
    """verl's form: a policy gradient whose weight is the ratio or the bound, whichever is less."""

    def loss_of(p, old, a):
        weights = [min(x, bound) for x in (p - old).exp().tolist()]
        outside = (divergence(p.exp(), old.exp()) > delta).tolist()
        mask = [not (far and (x > o if a > 0 else x < o)) for far, x, o in zip(outside, p, old, strict=True)]
        return -sum(w * a * x for w, x, keep in zip(weights, p, mask, strict=True) if keep) / len(p) + 0 * p.sum()

    case, flags = off_policy(seed), LossArguments(policy_loss=f"dppo_{name}", dppo_ratio_max=bound)
    loss, gradient, _ = gradient_of(flags, case.micro, case.log_probs)
    expected_loss, expected = case.expected(loss_of)
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_bounded_ratio_keeps_its_gradient(make_micro, gradient_of, name):
    """1e-5 to 1e-3 is a ratio of 100, which weighs 20. It counts as clipped."""
    micro = make_micro([[1]], old_log_probs=torch.tensor([1e-5]).log(), advantages=torch.tensor([1.0]))
    flags = LossArguments(policy_loss=name, dppo_ratio_max=20.0)
    _, gradient, metrics = gradient_of(flags, micro, torch.tensor([1e-3]).log().tolist())
    assert gradient.item() == pytest.approx(-20.0) and metrics["pg_clipfrac"].item() == 1.0


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_rare_token_may_have_any_ratio_and_a_common_one_may_not_move_far(make_micro, gradient_of, name):
    """1e-5 to 1e-3 is a ratio of 100, and hardly a change; 0.99 to 0.6 is a ratio of 0.6, and a large one."""
    old, new = torch.tensor([1e-5, 0.99, 0.99]).log(), torch.tensor([1e-3, 0.6, 0.6]).log()
    micro = make_micro([[1, 1, 1]], old_log_probs=old, advantages=torch.tensor([1.0, -1.0, 1.0]))
    _, gradient, metrics = gradient_of(LossArguments(policy_loss=name), micro, new.tolist())
    close = 4 * FEW_ROUNDINGS  # log-probs of -11.5 are rounded by up to 16 units, as their logarithm is
    assert gradient.tolist() == pytest.approx([-100 / 3, 0.0, -0.6 / 0.99 / 3], rel=close), "the third is pulled back"
    assert metrics["pg_clipfrac"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", ["ppo", "gspo", "geo_mean", "dppo_tv", "dppo_kl"])
def test_nothing_is_clipped_without_an_advantage(make_micro, gradient_of, name):
    """A clip takes a gradient away, and these tokens have none, however far they have moved."""
    old, new = torch.tensor([0.1, 0.9, 0.5, 0.9]).log(), torch.tensor([0.9, 0.1, 0.5, 0.1]).log()
    for number in (0.0, -0.0):
        micro = make_micro(
            [[1], [1], [1], [1]], old_log_probs=old, advantages=torch.tensor([number, number, number, -1.0])
        )
        _, gradient, metrics = gradient_of(LossArguments(policy_loss=name), micro, new.tolist())
        assert not gradient.any() and metrics["pg_clipfrac"].item() == 1 / 4, "the last is"


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_a_token_that_became_all_but_impossible_is_dropped(make_micro, gradient_of, name):
    """Its log ratio is beyond the bound of exponents, so the old probability must not be derived from it."""
    micro = make_micro([[1]], old_log_probs=torch.tensor([-0.5]), advantages=torch.tensor([-1.0]))
    _, gradient, metrics = gradient_of(LossArguments(policy_loss=name), micro, [-500.0])
    assert gradient.item() == 0.0 and metrics["pg_clipfrac"].item() == 1.0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--policy-loss dppo_tv --dppo-tv-delta 0", "--dppo-tv-delta 0.0: .*above 0"),
        ("--policy-loss dppo_kl --dppo-kl-delta nan", "--dppo-kl-delta nan: .*above 0"),
        ("--policy-loss dppo_tv --dppo-ratio-max -1", "--dppo-ratio-max -1.0: .*at least 0"),
        ("--policy-loss dppo_kl --dppo-ratio-max inf", "--dppo-ratio-max inf: .*finite"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    validated = validate(parse(f"{command} --policy-loss dppo_tv".split()))
    text = explain(validated)
    assert "-ρ A, 0 where D > δ" in text and "D = |p - p_old|, δ = 0.15" in text
    assert any("--dppo-tv-delta" in line for line in without_effect(validated.settings))
    assert not any("--dppo-ratio-max" in line for line in without_effect(validated.settings))
    validated = validate(parse(f"{command} --policy-loss dppo_kl --dppo-ratio-max 20".split()))
    assert "-sg(min(ρ, 20)) A log p, 0 where D > δ" in explain(validated)
    assert any("--dppo-ratio-max" in line for line in without_effect(validated.settings))
