"""OPO's advantages against 2505.23585, with lengths that come from the loss masks."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored_group
from tolerance import DOUBLE_ERROR

from miles.batch.convert import convert
from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments

OPO = LossArguments(advantage_estimator="opo")
TRAJECTORY = st.tuples(st.floats(-10, 10), st.integers(1, 50))


@given(st.lists(st.lists(TRAJECTORY, min_size=1, max_size=6), min_size=1, max_size=4))
def test_the_baseline_is_the_mean_weighted_by_length(advantages_of, groups):
    expected = []
    for group in groups:
        baseline = sum(length * reward for reward, length in group) / sum(length for _, length in group)
        expected.append(pytest.approx([reward - baseline for reward, _ in group], abs=DOUBLE_ERROR))
    assert advantages_of(OPO, [[r for r, _ in g] for g in groups], [[n for _, n in g] for g in groups]) == expected


@given(st.lists(TRAJECTORY, min_size=2, max_size=6))
def test_advantages_weighted_by_length_add_up_to_nothing(advantages_of, group):
    lengths = [length for _, length in group]
    [advantages] = advantages_of(OPO, [[reward for reward, _ in group]], [lengths])
    total = sum(a * n for a, n in zip(advantages, lengths, strict=True))
    assert total == pytest.approx(0.0, abs=DOUBLE_ERROR * sum(lengths))


def test_lengths_are_the_loss_tokens_of_the_trajectory():
    """A trajectory of 1 + 2 loss tokens is right, another of 1 is wrong: the baseline is 3/4."""
    group = scored_group(0, [[(1, 1.0), (2, 1.0)], [(1, 0.0)]], next(count()))
    [step] = convert([group], loss=OPO, global_batch_size=2)
    assert step.rewards == pytest.approx([0.25, 0.25, -0.75])


def test_without_loss_tokens_trajectories_weigh_alike(advantages_of):
    assert advantages_of(OPO, [[1.0, 0.0]], [[0, 0]]) == [[0.5, -0.5]]


def test_refused_for_a_group_of_one(command):
    with pytest.raises(ValueError, match="with --advantage-estimator opo every advantage is 0"):
        validate(parse(f"{command} --advantage-estimator opo --n-samples-per-prompt 1".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator opo".split())))
    assert "mean of its prompt group weighted by loss tokens" in text and "estimators/opo.py" in text
