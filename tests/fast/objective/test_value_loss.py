"""The critic's loss: clipping, and its denominator."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from miles.objective.settings import LossArguments
from miles.objective.value_loss import compute_value_loss, value_loss_function


def test_the_worse_of_the_two_counts():
    """Past the clip the loss only follows the critic if it moves away from the return."""
    values = torch.tensor([0.1, 0.5, 0.5, -0.5], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 1.0])
    losses, clipped = compute_value_loss(values, old, returns, value_clip=0.2)
    torch.testing.assert_close(losses, torch.tensor([0.81, 0.64, 0.25, 2.25]))
    assert clipped.tolist() == [0, 1, 0, 0]
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([-1.8, 0.0, 1.0, -3.0]))


@given(st.floats(0.01, 100), st.integers(0, 2**31))
def test_a_value_within_the_clip_is_never_clipped(scale, seed):
    """Whatever rounding makes of ``old + (value - old)``."""
    rng = torch.Generator().manual_seed(seed)
    values, old, returns = (torch.randn(500, generator=rng) for _ in range(3))
    losses, clipped = compute_value_loss(values, old * scale, returns, value_clip=12 * (1 + scale))
    assert not clipped.any() and losses.equal((values - returns).square())


def test_on_its_old_values_the_gradient_is_whole():
    values = torch.tensor([0.5], requires_grad=True)
    losses, _ = compute_value_loss(values, values.detach(), torch.tensor([2.0]), value_clip=0.2)
    losses.sum().backward()
    assert values.grad is not None and values.grad.item() == -3.0


@pytest.mark.parametrize(("mode", "expected"), [("sample_mean", (1 + 4) / 2), ("token_mean", (1 + 4 + 4 + 4) / 4)])
def test_averaged_as_the_diagnostics_are(make_micro, mode, expected):
    """Under ``constant`` too, whose divisor is the policy loss's alone."""
    micro = make_micro([[1, 0], [1, 1, 1]], values=torch.zeros(5), returns=torch.tensor([1.0, 99.0, 2.0, 2.0, 2.0]))
    values = torch.tensor([0.0, float("nan"), 0.0, 0.0, 0.0], requires_grad=True)
    loss = LossArguments(loss_aggregation=mode, calculate_per_token_loss=mode == "token_mean")
    output = value_loss_function(loss, micro, values)
    output.loss.backward()
    assert values.grad is not None and values.grad[1] == 0 and values.grad.isfinite().all()
    assert output.loss.item() == pytest.approx(expected)
    assert output.metrics["value_clipfrac"].item() == 0
    if mode == "sample_mean":
        constant = LossArguments(loss_aggregation="constant", loss_aggregation_divisor=100.0)
        assert value_loss_function(constant, micro, values).loss.item() == pytest.approx(expected)
