"""A mean is never a mean of means: every order and grouping of merges gives the same number."""

from __future__ import annotations

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from miles.metrics import Metric, merge, values

# Whole numbers add exactly in floating point, so that "the same" can mean equal.
whole = st.integers(-(2**30), 2**30).map(float)
metrics = st.dictionaries(st.sampled_from("abc"), st.builds(Metric, whole, whole.map(abs)), max_size=3)


@given(st.lists(metrics, max_size=8), st.randoms(use_true_random=False))
def test_merge_does_not_depend_on_order(parts: list[dict[str, Metric]], random) -> None:
    shuffled = list(parts)
    random.shuffle(shuffled)
    assert merge(shuffled) == merge(parts)


@given(st.lists(metrics, max_size=8), st.integers(0, 8))
def test_merge_does_not_depend_on_grouping(parts: list[dict[str, Metric]], cut: int) -> None:
    assert merge([merge(parts[:cut]), merge(parts[cut:])]) == merge(parts)


@given(st.lists(metrics, max_size=8))
def test_merge_keeps_every_name(parts: list[dict[str, Metric]]) -> None:
    assert set(merge(parts)) == {name for part in parts for name in part}


@given(st.lists(st.lists(whole, max_size=5), min_size=1, max_size=5).filter(any))
def test_merged_mean_is_the_mean_of_all_values(shards: list[list[float]]) -> None:
    merged = merge({"m": Metric.mean(shard)} for shard in shards)
    assert math.isclose(values(merged)["m"], statistics.fmean(v for shard in shards for v in shard), abs_tol=1e-6)


def test_a_metric_without_counts_is_nan() -> None:
    assert math.isnan(Metric.mean([]).value)
