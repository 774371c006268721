"""GDPO's advantages against 2601.05242, in float64, and the rewards that it reads."""

from __future__ import annotations

import statistics
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored_groups import scored_group
from tolerance import DOUBLE_ERROR

from miles.batch.convert import convert
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import SampleRewards
from miles.objective.settings import LossArguments

GDPO = LossArguments(advantage_estimator="gdpo")
WEIGHTS = {"correct": 1.0, "format": 0.25}
PAIR = st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.5, 2.0]))


def advantages(groups):
    """Of groups of (correct, format)."""
    flat = [(g, pair) for g, group in enumerate(groups) for pair in group]
    samples = SampleRewards(
        [sum(w * r for w, r in zip(WEIGHTS.values(), pair, strict=True)) for _, pair in flat],
        [g for g, _ in flat],
        range(len(flat)),
        parts=[dict(zip(WEIGHTS, pair, strict=True)) for _, pair in flat],
        part_weights=WEIGHTS,
    )
    values = iter(build_objective(GDPO).sample_advantages(samples))
    return [[next(values) for _ in group] for group in groups]


@given(st.lists(st.lists(PAIR, min_size=1, max_size=6), min_size=1, max_size=4))
def test_each_reward_is_normalized_by_itself_then_the_sum_over_the_iteration(groups):
    sums = []
    for group in groups:
        of_group = [0.0] * len(group)
        for k, weight in enumerate(WEIGHTS.values()):
            rewards = [pair[k] for pair in group]
            mean = sum(rewards) / len(rewards)
            spread = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
            of_group = [s + weight * (r - mean) / (spread + 1e-6) for s, r in zip(of_group, rewards, strict=True)]
        sums.append(of_group)
    everything = [s for group in sums for s in group]
    spread = statistics.stdev(everything) if len(everything) > 1 else 0.0
    expected = [[s / (spread + 1e-6) for s in group] for group in sums]
    for values, wanted in zip(advantages(groups), expected, strict=True):
        assert values == pytest.approx(wanted, abs=DOUBLE_ERROR)


def test_combinations_of_one_sum_differ_where_grpo_has_them_equal():
    """Right without format, and wrong with four formats, add up to 1 each: GRPO cannot tell them apart."""
    pairs = [(1.0, 0.0), (0.0, 4.0), (0.0, 0.0), (1.0, 4.0), (1.0, 0.0)]
    [values] = advantages([pairs])
    assert abs(values[0] - values[1]) > 0.1


def test_one_reward_is_grpo_over_the_spread_of_the_iteration(advantages_of):
    groups = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]
    grpo = advantages_of(LossArguments(advantage_estimator="grpo"), groups)
    spread = statistics.stdev([a for group in grpo for a in group])
    for values, plain in zip(advantages_of(GDPO, groups), grpo, strict=True):
        assert values == pytest.approx([a / (spread + 1e-6) for a in plain], rel=DOUBLE_ERROR)


def test_rewards_reach_it_through_the_conversion():
    group = scored_group(0, [[(1, 1.0)], [(1, 0.25)]], next(count()))
    for sample, parts in zip(group.samples, ([1.0, 0.0], [0.0, 1.0]), strict=True):
        sample.reward_parts = dict(zip(WEIGHTS, parts, strict=True))
    [step] = convert([group], loss=GDPO, global_batch_size=2, reward_weights=WEIGHTS)
    [expected] = advantages([[(1.0, 0.0), (0.0, 1.0)]])
    assert step.rewards == pytest.approx(expected)


@pytest.mark.parametrize("weights", [{}, {"correct": 1.0}, {"correct": 1.0, "length": -0.1}])
@pytest.mark.parametrize("parts", [{"correct": 1.0, "format": 0.0}, {}])
def test_rewards_that_have_other_weights_or_none_are_refused(weights, parts):
    """Saved samples may have such rewards."""
    samples = SampleRewards([1.0, 0.0], [4, 4], [8, 9], parts=[parts, parts], part_weights=weights)
    if not parts and len(weights) <= 1:  # one reward, which has no parts
        of_group = 0.5 / (0.5**0.5 + 1e-6)
        a = of_group / (of_group * 2**0.5 + 1e-6)
        assert build_objective(GDPO).sample_advantages(samples) == pytest.approx([a, -a], rel=DOUBLE_ERROR)
        return
    names = ", ".join(parts) or "of no name"
    with pytest.raises(ValueError, match=f"the samples have the rewards {names}, and .*; give --rm-type the names"):
        build_objective(GDPO).sample_advantages(samples)


def test_a_sample_without_the_rewards_of_others_is_named():
    samples = SampleRewards([1.0, 0.0], [4, 4], [8, 9], parts=[{"correct": 1.0}, {}])
    with pytest.raises(ValueError, match="trajectory 9 of prompt group 4 has the rewards of no name, others have corr"):
        build_objective(GDPO).sample_advantages(samples)
