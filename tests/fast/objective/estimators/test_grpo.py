"""GRPO's advantages against 2402.03300, and Dr.GRPO's against 2503.20783."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DEVIATION_ERROR

from miles.objective.settings import LossArguments

GROUPS = st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.3, 1.0, 7.0]), min_size=1, max_size=6), min_size=1, max_size=4)


def centered(group):
    return [reward - math.fsum(group) / len(group) for reward in group]


def in_deviations(group):
    """(r_i - mean(r)) / (std(r) + 1e-6), with the unbiased deviation that the authors' framework has."""
    if len(group) == 1:
        return [0.0]
    deviation = math.sqrt(math.fsum(x * x for x in centered(group)) / (len(group) - 1))
    return [x / (deviation + 1e-6) for x in centered(group)]


@pytest.mark.parametrize(
    ("flags", "formula"),
    [
        ({}, in_deviations),
        ({"disable_grpo_std_normalization": True}, centered),
        ({"disable_rewards_normalization": True}, list),
    ],
    ids=["grpo", "Dr.GRPO", "rewards unchanged"],
)
@given(groups=GROUPS)
def test_advantages_are_those_of_the_formula(advantages_of, flags, formula, groups):
    advantages = advantages_of(LossArguments(advantage_estimator="grpo", **flags), groups)
    assert advantages == [pytest.approx(formula(group), abs=DEVIATION_ERROR) for group in groups]
