from fractions import Fraction
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.rollout.metrics import (
    pass_at_k,
    pass_at_k_metrics,
    powers_of_two,
    rollout_metrics,
    with_own_metrics,
)
from miles.tasks.rewards.registry import passes_of
from miles.types.metrics import Metric
from miles.types.sample import Prompt, PromptGroup, Sample

outcomes = st.lists(st.booleans(), min_size=1, max_size=8)


@given(outcomes, st.integers(1, 8))
def test_it_is_the_share_of_k_subsets_with_a_pass(passed, k):
    k = min(k, len(passed))
    subsets = list(combinations(passed, k))
    expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(float(expected), abs=DOUBLE_ERROR)


def test_powers_of_two_end_at_the_largest_that_fits():
    assert [powers_of_two(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


def test_metrics_average_over_prompts_that_have_k_responses():
    metrics = pass_at_k_metrics([[True, False], [False, False], [True]])
    assert metrics["pass@1"].value == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["pass@2"].value == pytest.approx(1 / 2)
    assert set(metrics) == {"pass@1", "pass@2"}


@pytest.mark.parametrize(
    ("parts", "dropped", "expected"),
    [
        ({}, 0, [True, False]),  # the reward itself
        ({"repetition": [1.0, 1.0], "math": [0.0, 1.0], "f1": [1.0, 1.0]}, 0, [False, True]),
        ({"custom": [1.0, 1.0], "math": [0.0, 1.0]}, 0, [False, True]),
        ({"format": [1.0, 1.0], "custom": [0.0, 1.0]}, 0, [False, True]),
        ({"format": [0.0, 1.0], "length": [1.0, 0.0]}, 0, [True, False]),  # no part decides
        ({}, 2, [True, False, False, False]),
    ],
)
def test_the_part_that_knows_the_answer_decides_and_what_was_dropped_does_not_pass(parts, dropped, expected):
    group = PromptGroup(0, Prompt("p", (1,)), dropped_trajectories=dropped)
    for k, reward in enumerate([1.0, 0.5]):
        sample_parts = {name: column[k] for name, column in parts.items()}
        group.samples.append(Sample(group.prompt, 0, k, reward=reward, reward_parts=sample_parts))
    assert passes_of(group) == expected
    rate = sum(expected) / len(expected)
    metrics = rollout_metrics([group], [group], 0, log_passrate=True)
    assert metrics["rollout/pass@1"].value == pytest.approx(rate)


def test_a_trajectory_counts_once_however_many_samples_it_has():
    """As it does in every estimator."""
    rewards = {0: [1.0, 1.0, 1.0], 1: [0.0], 2: [1.0, 0.0]}  # by trajectory: 1, 0 and 1/2
    group, reduced = (PromptGroup(0, Prompt("p", (1,), prompt_set="a")) for _ in range(2))
    for trajectory, of_samples in rewards.items():
        for each, reward in [(group, reward) for reward in of_samples] + [(reduced, fmean(of_samples))]:
            each.samples.append(Sample(each.prompt, 0, trajectory, reward=reward, reward_parts={"math": reward}))
    metrics, expected = (rollout_metrics([each], [each], 0, log_passrate=True) for each in (group, reduced))
    names = ["reward", "reward_std", "reward/a", "reward_parts/math", "pass@1", "pass@2"]
    assert [metrics[f"rollout/{name}"] for name in names] == [expected[f"rollout/{name}"] for name in names]
    assert metrics["rollout/reward"].value == 0.5 and "rollout/pass@4" not in metrics


def test_equal_rewards_have_no_deviation_however_trajectories_are_split():
    """The rounded sum of three times 0.1, over three, is another number."""
    samples = [Sample(Prompt("p", (1,)), 0, trajectory, reward=0.1) for trajectory in (0, 0, 0, 1)]
    group = PromptGroup(0, samples[0].prompt, samples)
    metrics = rollout_metrics([group], [group], 0, log_passrate=False)
    assert (metrics["rollout/reward_std"].value, metrics["rollout/reward"].value) == (0.0, 0.1)


def test_samples_of_a_trajectory_may_have_different_parts():
    group = PromptGroup(0, Prompt("p", (1,)))
    group.samples += [Sample(group.prompt, 0, 0, reward=1.0, reward_parts=parts) for parts in ({"a": 1.0}, {"b": 3.0})]
    metrics = rollout_metrics([group], [group], 0, log_passrate=False)
    assert [metrics[f"rollout/reward_parts/{name}"].value for name in "ab"] == [1.0, 3.0]


def test_a_mean_over_nothing_is_not_taken_for_a_metric_of_the_users():
    metrics = {"rollout/staleness": Metric(0, 0), "rollout/reward": Metric(1.0)}
    assert with_own_metrics(metrics, lambda extra: False, "my:log") == metrics
    assert with_own_metrics(metrics, lambda extra: True, "my:log") == {}
    for name in metrics:
        with pytest.raises(ValueError, match=f"my:log: the metric {name} is nan"):
            with_own_metrics(metrics, lambda extra, name=name: extra.update({name: float("nan")}), "my:log")
