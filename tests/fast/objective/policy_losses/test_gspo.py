"""GSPO against 2507.18071: its advantages are GRPO's, and its loss clips the geometric mean of a sequence's ratios."""

from __future__ import annotations

import math

import pytest
import torch
from tolerance import DOUBLE_ERROR, FEW_ROUNDINGS

from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (3e-4, 4e-4), (0.05, 0.5)])
def test_loss_and_gradient(off_policy, gradient_of, low, high, seed):
    def formula(p, old, a):
        """-min(s A, clip(s, 1 - low, 1 + high) A), s = (p(y) / p_old(y))^(1 / |y|): equations 5 and 7."""
        s = torch.exp((p.sum() - old.sum()) / len(p))
        return -torch.minimum(s * a, s.clamp(1 - low, 1 + high) * a)

    case = off_policy(seed)
    expected_loss, expected = case.expected(formula)
    flags = LossArguments(policy_loss="gspo", eps_clip=low, eps_clip_high=high)
    loss, gradient, metrics = gradient_of(flags, case.micro, case.log_probs)
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
    assert "pg_clipfrac" in metrics


def test_its_estimator_has_the_advantages_of_grpo_and_this_loss(advantages_of):
    gspo = LossArguments(advantage_estimator="gspo")
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert advantages_of(gspo, [[1.0, 0.0], [2.0]]) == [pytest.approx([half, -half], rel=DOUBLE_ERROR), [0.0]]
    assert build_objective(gspo).policy_loss.name == "gspo"
