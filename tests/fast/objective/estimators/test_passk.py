"""The two pass@k estimators against their definitions, by enumeration: 2503.19595 and 2508.10751."""

from __future__ import annotations

import math
import statistics
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments

BEST = LossArguments(advantage_estimator="passk_best")
RIGHT = st.lists(st.booleans(), min_size=1, max_size=8)


def analytic(k, **flags):
    return LossArguments(advantage_estimator="passk_analytic", pass_k=k, **flags)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=6))
def test_best_is_the_maximum_less_the_maximum_without(advantages_of, group):
    expected = [max(group) - max(group[:i] + group[i + 1 :]) for i in range(len(group))]
    assert advantages_of(BEST, [group]) == [pytest.approx(expected)]


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=2, max_size=6))
def test_best_in_units_of_the_groups_spread_is_verls(advantages_of, group):
    spread = math.sqrt(sum((r - sum(group) / len(group)) ** 2 for r in group) / (len(group) - 1))
    leads = [max(group) - max(group[:i] + group[i + 1 :]) for i in range(len(group))]
    advantages = advantages_of(LossArguments(advantage_estimator="passk_best", passk_best_std=True), [group])
    assert advantages == [pytest.approx([lead / (spread + 1e-6) for lead in leads])]


def test_best_gives_ties_nothing(advantages_of):
    assert advantages_of(BEST, [[2.0, 2.0, 0.0], [-1.0, -3.0, -2.0]]) == [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]


@given(right=RIGHT, k=st.integers(1, 5))
def test_analytic_is_the_mean_over_the_subsets_that_contain_the_answer(advantages_of, right, k):
    subsets = list(combinations(range(len(right)), k))
    rewards = [float(any(right[i] for i in subset)) for subset in subsets]
    spread = statistics.pstdev(rewards) if rewards else 0.0
    expected = [0.0] * len(right)
    if spread > 0:
        mean = statistics.mean(rewards)
        for i in range(len(right)):
            mine = [reward for subset, reward in zip(subsets, rewards, strict=True) if i in subset]
            expected[i] = (statistics.mean(mine) - mean) / spread
    assert advantages_of(analytic(k), [[float(r) for r in right]]) == [pytest.approx(expected, abs=DOUBLE_ERROR)]


@given(right=RIGHT, k=st.integers(1, 5))
def test_analytic_advantages_add_up_to_nothing(advantages_of, right, k):
    [advantages] = advantages_of(analytic(k), [[float(r) for r in right]])
    assert sum(advantages) == pytest.approx(0.0, abs=DOUBLE_ERROR)


def test_what_is_right_is_a_flag(advantages_of):
    rewards = [[1.0, 0.5, 0.25, 0.0]]
    assert advantages_of(analytic(1, pass_correct_above=0.3), rewards) == [[1.0, 1.0, -1.0, -1.0]]
    assert advantages_of(analytic(1), [[1.0, -1.0]]) == [[1.0, -1.0]], "rewards of 1 and -1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("passk_best --n-samples-per-prompt 1", "with --advantage-estimator passk_best every advantage is 0"),
        ("passk_analytic --pass-k 4", "it compares 5 or more answers of a prompt"),
        ("passk_analytic --pass-k 0", "--pass-k 0: .*at least 1"),
        ("passk_analytic --pass-correct-above nan", "--pass-correct-above nan"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} --advantage-estimator {flags}".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator passk_analytic --pass-k 3".split())))
    assert "R = 1 - C(W, 3) / C(N, 3)" in text and "C(W-1, 2) / C(N-1, 2)" in text
    text = explain(validate(parse(f"{command} --advantage-estimator passk_best".split())))
    assert "A = max of its prompt group - max of the other rewards" in text
    text = explain(validate(parse(f"{command} --advantage-estimator passk_best --passk-best-std".split())))
    assert "max of the other rewards of the group) / std of the group" in text
