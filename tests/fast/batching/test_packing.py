"""Bins of a budget and balanced parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from miles.batching.packing import balanced_partition, pack_by_budget

LENGTHS = st.lists(st.integers(1, 60), max_size=30)


@given(LENGTHS, st.integers(1, 100))
def test_bins_cover_each_index_once_within_the_budget(lengths, budget):
    bins = pack_by_budget(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(b and (len(b) == 1 or sum(lengths[i] for i in b) <= budget) for b in bins)


@given(LENGTHS, st.integers(1, 100))
def test_no_two_bins_fit_into_one(lengths, budget):
    sums = sorted(sum(lengths[i] for i in b) for b in pack_by_budget(lengths, budget))
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(LENGTHS, st.integers(1, 8))
def test_parts_cover_each_index_once(weights, parts):
    found = balanced_partition(weights, parts)
    assert len(found) == parts
    assert sorted(i for part in found for i in part) == list(range(len(weights)))
    assert found == balanced_partition(list(weights), parts)


@given(LENGTHS, st.integers(1, 8))
def test_parts_differ_by_at_most_the_largest_weight(weights, parts):
    sums = [sum(weights[i] for i in part) for part in balanced_partition(weights, parts)]
    assert max(sums) - min(sums) <= max(weights, default=0)


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 50))
def test_equal_weights_are_shared_equally(parts, each, weight):
    assert all(len(part) == each for part in balanced_partition([weight] * (parts * each), parts))
