"""Leave-one-out advantages against their definition, and the rules of the flag."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments

RLOO = LossArguments(advantage_estimator="rloo")
COMMAND = (
    "--hf-checkpoint some/model --prompt-data reasoning_gym:products --rm-type last_number --num-rollout 2 "
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 --advantage-estimator rloo"
)


def advantages(rewards, groups, trajectories=None) -> list[float]:
    samples = SampleRewards(rewards, groups, range(len(rewards)) if trajectories is None else trajectories)
    return build_objective(RLOO).sample_advantages(samples)


@given(st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=4))
def test_the_baseline_is_the_mean_of_the_others(groups):
    rewards = [reward for group in groups for reward in group]
    indices = [i for i, group in enumerate(groups) for _ in group]
    expected = [
        reward - statistics.mean(group[:place] + group[place + 1 :])
        for group in groups
        for place, reward in enumerate(group)
    ]
    assert advantages(rewards, indices) == pytest.approx(expected, abs=DOUBLE_ERROR)


def test_one_right_answer_of_four():
    assert advantages([1.0, 0.0, 0.0, 0.0], [0] * 4) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_a_trajectory_in_two_samples_is_one_of_the_others_once():
    assert advantages([1.0, 1.0, 0.0, 0.5], [0] * 4, [7, 7, 8, 9]) == pytest.approx([0.75, 0.75, -0.75, 0.0])


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero_and_no_gradient(reward):
    values = advantages([reward] * 3, [0] * 3)
    assert values == [0.0] * 3
    assert build_objective(RLOO).samples_with_gradient(values) == [False] * 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--n-samples-per-prompt 1", "--n-samples-per-prompt 1: with --advantage-estimator rloo every advantage is 0"),
        ("--kl-coef 0.1", "--kl-coef 0.1: contradicts --advantage-estimator rloo, .*; use --use-kl-loss"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{COMMAND} {flags}".split()))


def test_explained():
    text = explain(validate(parse(COMMAND.split())))
    assert "A = reward - mean of the other rewards of its prompt group" in text
    assert "miles/objective/estimators/rloo.py" in text
