"""CISPO's token losses and gradients against its formula, and the rules of the flag."""

from __future__ import annotations

import math

import pytest
import torch

from miles.config.explain import explain, without_effect
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.loss_types.policy_loss import policy_loss_function
from miles.objective.settings import LossArguments

CISPO = LossArguments(policy_loss="cispo", ratio_max=2.0)
COMMAND = (
    "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 2 "
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --policy-loss cispo"
)


@pytest.fixture
def micro(make_micro):
    """One sample of four loss tokens and a masked one whose numbers are NaN; ratios of 1, 3, 0.25 and 3."""
    old = [-1.0, -1.0 - math.log(3), -1.0 + math.log(4), -1.0 - math.log(3), math.nan]
    advantages = [0.5, 1.0, -2.0, -1.0, math.nan]
    return make_micro([[1, 1, 1, 1, 0]], old_log_probs=torch.tensor(old), advantages=torch.tensor(advantages))


def test_a_clipped_token_keeps_its_gradient_with_the_bounded_weight(micro):
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0, math.nan], requires_grad=True)
    output = policy_loss_function(build_objective(CISPO), micro, log_probs, None)
    output.loss.backward()
    weights = torch.tensor([1.0, 2.0, 0.25, 2.0])
    expected = -weights * micro.advantages[:4]
    assert output.metrics["pg_loss"].item() == pytest.approx((expected * -1.0).mean().item())
    torch.testing.assert_close(log_probs.grad, torch.cat([expected / 4, torch.zeros(1)]))
    assert output.metrics["pg_clipfrac"].item() == 0.5, "whatever the sign of the advantage"


def test_a_lower_bound_raises_the_weight_of_rare_tokens(micro):
    """verl 0.9.1 clips below too; the bounds are absolute."""
    loss = LossArguments(policy_loss="cispo", ratio_min=0.8, ratio_max=1.2)
    log_probs = torch.tensor([-1.0, -1.0, -1.0, -1.0, math.nan], requires_grad=True)
    output = policy_loss_function(build_objective(loss), micro, log_probs, None)
    output.loss.backward()
    expected = -torch.tensor([1.0, 1.2, 0.8, 1.2]) * micro.advantages[:4]
    torch.testing.assert_close(log_probs.grad, torch.cat([expected / 4, torch.zeros(1)]))
    assert output.metrics["pg_clipfrac"].item() == 0.75


def test_on_policy_it_is_the_policy_gradient(make_micro):
    """One step per iteration: every ratio is 1, and the gradient equals PPO's."""
    micro = make_micro([[1, 1], [1]], advantages=torch.tensor([0.5, 0.5, -1.0]))
    gradients = []
    for name in ("cispo", "ppo"):
        log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
        policy_loss_function(build_objective(LossArguments(policy_loss=name)), micro, log_probs, None).loss.backward()
        gradients.append(log_probs.grad)
    torch.testing.assert_close(*gradients)


def test_a_sample_without_advantage_has_no_gradient():
    assert build_objective(CISPO).samples_with_gradient([0.0, -1.0]) == [False, True]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--ratio-max 0", "--ratio-max 0.0: .*above 0"),
        ("--ratio-max nan", "--ratio-max nan: .*above 0"),
        ("--ratio-min 6", "--ratio-min 6.0: is above --ratio-max 5; give a lower bound"),
        ("--ratio-min -1", "--ratio-min -1.0: .*at least 0"),
        (
            "--loss-type sft_loss --load-debug-rollout-data x{iteration}",
            "--policy-loss cispo: is no part of --loss-type sft_loss",
        ),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{COMMAND} {flags}".split()))


@pytest.mark.parametrize("more", ["", "--advantage-estimator gspo", "--advantage-estimator ppo", "--use-tis"])
def test_explained(more):
    validated = validate(parse(f"{COMMAND} --ratio-max 4 {more}".split()))
    text = explain(validated)
    assert "-sg(min(ρ, 4)) A log p" in text and "miles/objective/policy_losses/cispo.py" in text
    assert any("--ratio-max" in line for line in without_effect(validated.settings))
