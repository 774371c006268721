"""What every policy loss does on-policy, with masked and extreme tokens, and without advantage."""

from __future__ import annotations

import pytest
import torch

from miles.objective.chosen import build_objective
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.settings import LossArguments

MASKS = [[1, 1, 0, 1], [1], [0, 0]]
ADVANTAGES = torch.tensor([0.5, 0.5, torch.nan, 0.5, -2.0, torch.nan, torch.nan])
LOG_PROBS = [-1.0, -2.0, torch.nan, -0.1, -3.0, torch.nan, torch.nan]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_it_is_the_policy_gradient(make_micro, gradient_of, name):
    """Of each token up to one factor per sequence, which is 1 but for losses that weigh by length."""
    _, gradient, _ = gradient_of(LossArguments(policy_loss=name), make_micro(MASKS, advantages=ADVANTAGES), LOG_PROBS)
    tokens = torch.tensor([3.0, 1.0]).double() if name == "luspo" else torch.ones(2).double()
    expected = [-0.5 / 3 * tokens[0]] * 2 + [0.0, -0.5 / 3 * tokens[0], 2.0 * tokens[1], 0.0, 0.0]
    torch.testing.assert_close(gradient, torch.tensor(expected).double() / len(MASKS))


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("shift", [-1000.0, -60.0, 60.0, 1000.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_no_distance_from_the_old_policy_makes_it_infinite(make_micro, gradient_of, name, shift, advantage):
    old = torch.tensor([p - shift for p in LOG_PROBS])
    micro = make_micro(MASKS, old_log_probs=old, advantages=ADVANTAGES * 0 + advantage)
    loss, gradient, _ = gradient_of(LossArguments(policy_loss=name), micro, LOG_PROBS)
    assert torch.isfinite(torch.tensor(loss)) and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_it_says_whether_a_sample_without_advantage_has_a_gradient(off_policy, gradient_of, name):
    case = off_policy(0)
    case.micro.advantages.zero_()
    loss = LossArguments(policy_loss=name)
    _, gradient, _ = gradient_of(loss, case.micro, case.log_probs)
    assert bool(gradient.any()) is build_objective(loss).policy_loss.zero_advantage_has_gradient(loss)
