"""What estimators that compare within a group do with one trajectory, equal rewards, order and split samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.objective.chosen import build_objective
from miles.objective.estimators import ESTIMATORS
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments

NAMES = [
    name
    for name, estimator in ESTIMATORS.items()
    if estimator.smallest_group(LossArguments()) > 1 and not estimator.by_token
]
GROUPS = st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=6), min_size=1, max_size=4)


def test_those_that_compare():
    assert {"grpo", "rloo"} < set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(groups=GROUPS, reward=st.floats(0.0, 10.0))
def test_a_group_of_one_and_equal_rewards_have_exactly_no_advantage_and_no_gradient(
    advantages_of, name, groups, reward
):
    loss = LossArguments(advantage_estimator=name)
    advantages = advantages_of(loss, [*groups, [reward], [reward] * 3])
    assert advantages[-2:] == [[0.0], [0.0] * 3]
    assert build_objective(loss).samples_with_gradient(advantages[-1]) == [False] * 3


@pytest.mark.parametrize("name", NAMES)
@given(groups=GROUPS, seed=st.randoms(use_true_random=False))
def test_the_order_of_groups_and_trajectories_does_not_matter(advantages_of, name, groups, seed):
    indices = [(g, i) for g, group in enumerate(groups) for i in range(len(group))]
    shuffled = list(indices)
    seed.shuffle(shuffled)
    rewards, ids = [groups[g][i] for g, i in shuffled], [10 * g + i for g, i in shuffled]
    samples = SampleRewards(rewards, [g for g, _ in shuffled], ids, [1] * len(indices))
    loss = LossArguments(advantage_estimator=name)
    values = dict(zip(shuffled, build_objective(loss).sample_advantages(samples), strict=True))
    expected = advantages_of(loss, groups)
    assert [values[g, i] for g, i in indices] == pytest.approx([expected[g][i] for g, i in indices], abs=DOUBLE_ERROR)


@pytest.mark.parametrize("name", NAMES)
@given(group=st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5))
def test_a_trajectory_in_two_samples_counts_once(advantages_of, name, group):
    """Two samples of three loss tokens each are one trajectory of six."""
    loss = LossArguments(advantage_estimator=name)
    n = len(group)
    samples = SampleRewards([*group, group[0]], [0] * (n + 1), [*range(n), 0], [3] + [2] * (n - 1) + [3])
    advantages = build_objective(loss).sample_advantages(samples)
    [expected] = advantages_of(loss, [group], [[6] + [2] * (n - 1)])
    assert advantages == pytest.approx([*expected, expected[0]], abs=DOUBLE_ERROR)


@pytest.mark.parametrize("name", NAMES)
def test_samples_that_are_rewarded_apart_in_equal_trajectories_have_usual_advantages(name):
    """No trajectory differs from the others, so there is no deviation to divide by."""
    samples = SampleRewards([0.0, 1.0] * 4, [0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], [3] * 8)
    advantages = build_objective(LossArguments(advantage_estimator=name)).sample_advantages(samples)
    assert max(map(abs, advantages)) <= 1.0 and sum(advantages) == 0.0
