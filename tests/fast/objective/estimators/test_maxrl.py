"""MaxRL's advantages against 2602.02710: the formula, and the gradient that they are meant to have."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments

MAXRL = LossArguments(advantage_estimator="maxrl")


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_binary_rewards(advantages_of, right):
    """1{K > 0} (r_i / K - 1 / N), up to the factor N that the mean over N trajectories divides away."""
    n, k = len(right), sum(right)
    expected = [n * (r / k - 1 / n) if k else 0.0 for r in right]
    assert advantages_of(MAXRL, [[float(r) for r in right]]) == [pytest.approx(expected)]


@given(p=st.floats(0.01, 0.99), n=st.integers(2, 6))
def test_the_expected_gradient_is_that_of_the_truncated_likelihood(advantages_of, p, n):
    """By enumeration of a coin with P(right) = p: E of mean A d log P / dp is sum over k < N of (1 - p)^(k - 1)."""
    expected = sum((1 - p) ** (k - 1) for k in range(1, n))
    gradient = 0.0
    for outcome in product([1.0, 0.0], repeat=n):
        probability = p ** sum(outcome) * (1 - p) ** (n - sum(outcome))
        [advantages] = advantages_of(MAXRL, [outcome])
        scores = [1 / p if right else -1 / (1 - p) for right in outcome]
        gradient += probability * sum(a * s for a, s in zip(advantages, scores, strict=True)) / n
    assert gradient == pytest.approx(expected, rel=DOUBLE_ERROR)


def test_a_rare_success_weighs_more_than_a_common_one(advantages_of):
    assert advantages_of(MAXRL, [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0]]) == [
        [3.0, -1.0, -1.0, -1.0],
        pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0]),
    ]


def test_a_negative_reward_is_an_error(advantages_of):
    with pytest.raises(ValueError, match="--advantage-estimator maxrl: reward -1 in prompt group 1"):
        advantages_of(MAXRL, [[1.0, 0.0], [1.0, -1.0]])


def test_refused_for_a_group_of_one(command):
    with pytest.raises(ValueError, match="with --advantage-estimator maxrl every advantage is 0"):
        validate(parse(f"{command} --advantage-estimator maxrl --n-samples-per-prompt 1".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator maxrl".split())))
    assert "(reward - mean of its prompt group) / that mean" in text and "estimators/maxrl.py" in text
