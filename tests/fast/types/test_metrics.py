"""A mean is never a mean of means: every order and grouping of sums gives the same number."""

from __future__ import annotations

import functools
import math
import operator
import statistics

from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.types.metrics import Metric

# Whole numbers add exactly in floating point, so that "the same" can mean equal.
whole = st.integers(-(2**30), 2**30).map(float)
metrics = st.lists(st.builds(Metric, whole, whole.map(abs)), min_size=1, max_size=8)


def total(parts: list[Metric]) -> Metric:
    return functools.reduce(operator.add, parts)


@given(metrics, st.randoms(use_true_random=False))
def test_a_sum_does_not_depend_on_order(parts: list[Metric], random) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert total(shuffled) == total(parts)


@given(metrics, metrics)
def test_a_sum_does_not_depend_on_grouping(some: list[Metric], others: list[Metric]) -> None:
    assert total(some) + total(others) == total(some + others)


@given(st.lists(st.lists(whole, max_size=5), min_size=1, max_size=5).filter(any))
def test_the_sum_of_means_is_the_mean_of_all_values(shards: list[list[float]]) -> None:
    merged = total([Metric.mean(shard) for shard in shards])
    expected = statistics.fmean(v for shard in shards for v in shard)
    assert math.isclose(merged.value, expected, rel_tol=DOUBLE_ERROR)


def test_a_metric_without_counts_is_nan() -> None:
    assert math.isnan(Metric.mean([]).value)
