"""Group statistics of rewards."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DEVIATION_ERROR

from miles.objective.estimators.base import SampleRewards, less_group_mean, spread_over_tokens

rewards_of_groups = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=6), min_size=1, max_size=4)


def normalize_rewards(rewards, group_indices, trajectory_ids, std):
    return less_group_mean(SampleRewards(rewards, group_indices, trajectory_ids), std=std)


def flat(groups: list[list[float]]) -> tuple[list[float], list[int]]:
    return [r for g in groups for r in g], [i for i, g in enumerate(groups) for _ in g]


@given(rewards_of_groups, st.booleans())
def test_matches_torch_group_by_group(groups, std):
    rewards, indices = flat(groups)
    expected: list[float] = []
    for group in groups:
        values = torch.tensor(group, dtype=torch.float64)
        centred = values - values.mean()
        scale = values.std() + 1e-6 if std and len(group) > 1 else torch.tensor(1.0)
        expected += (centred / scale).tolist()
    advantages = normalize_rewards(rewards, indices, range(len(rewards)), std=std)
    assert advantages == pytest.approx(expected, abs=DEVIATION_ERROR)


@given(rewards_of_groups, st.booleans(), st.data())
def test_order_does_not_matter(groups, std, data):
    rewards, indices = flat(groups)
    order = data.draw(st.permutations(range(len(rewards))))
    straight = normalize_rewards(rewards, indices, range(len(rewards)), std=std)
    shuffled = normalize_rewards([rewards[i] for i in order], [indices[i] for i in order], order, std=std)
    assert shuffled == [straight[i] for i in order], "means and deviations are rounded once"


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6), st.integers(2, 4), st.booleans())
def test_a_trajectory_in_several_samples_counts_once(rewards, pieces, std):
    whole = normalize_rewards(rewards, [0] * len(rewards), range(len(rewards)), std=std)
    cut_ids = [0] * (pieces - 1) + list(range(len(rewards)))
    cut = normalize_rewards([rewards[0]] * (pieces - 1) + rewards, [0] * len(cut_ids), cut_ids, std=std)
    assert cut == [whole[0]] * (pieces - 1) + whole


@given(st.floats(-10, 10), st.integers(1, 5), st.booleans())
def test_equal_rewards_and_groups_of_one_give_exactly_zero(reward, size, std):
    assert normalize_rewards([reward] * size, [3] * size, range(size), std=std) == [0.0] * size


def test_a_reward_that_is_no_number_is_named():
    with pytest.raises(ValueError, match="nan for trajectory 8 of prompt group 4"):
        SampleRewards([1.0, float("nan")], [4, 4], [7, 8]).check_finite()


def test_every_token_gets_its_samples_reward():
    index = torch.tensor([0, 0, 2])
    assert spread_over_tokens(torch.tensor([0.5, 9.0, -1.0]), index).tolist() == [0.5, 0.5, -1.0]
    assert spread_over_tokens(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
