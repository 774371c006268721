"""Bins of a budget and balanced parts."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.batch.schedule import WIDE, PackedSamples, balanced_partition, pack_shares, rows_by_budget, split_to_count


class PackedSample(NamedTuple):
    """A row of ``PackedSamples``, whose prompt is one byte."""

    prompt: bytes
    prompt_length: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of the sample if it shares nothing."""
        return self.prompt_length + self.response


def columns_of(samples):
    return PackedSamples(
        np.array([ord(sample.prompt) for sample in samples], np.int64),
        np.array([sample.prompt_length for sample in samples], np.int64),
        np.array([sample.response for sample in samples], np.int64),
    )


def pack_by_budget(samples, budget):
    """Return the bins of a single share."""
    return pack_shares(columns_of(samples), [range(len(samples))], budget)[0]


LENGTHS = st.lists(st.integers(1, 60), max_size=30)
PROMPT_LENGTHS = {b"a": 5, b"b": 9, b"c": 20}
SAMPLES = st.lists(
    st.builds(
        lambda prompt, response: PackedSample(prompt, PROMPT_LENGTHS[prompt], response),
        st.sampled_from(sorted(PROMPT_LENGTHS)),
        st.integers(0, 30),
    ),
    max_size=30,
)


def packed_tokens(samples):
    """Tokens of a bin that keeps one copy of every prompt."""
    return sum(s.response for s in samples) + sum(PROMPT_LENGTHS[p] for p in {s.prompt for s in samples})


@given(SAMPLES, st.integers(1, 100))
def test_bins_cover_each_index_once_within_the_budget(samples, budget):
    bins = pack_by_budget(samples, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(samples)))
    assert all(b and (len(b) == 1 or packed_tokens([samples[i] for i in b]) <= budget) for b in bins)


@given(SAMPLES, st.integers(1, 100))
def test_no_two_bins_fit_into_one(samples, budget):
    bins = pack_by_budget([s._replace(prompt=bytes([i])) for i, s in enumerate(samples)], budget)
    sums = sorted(sum(samples[i].length for i in b) for b in bins)
    assert len(sums) < 2 or sums[0] + sums[1] > budget


@given(LENGTHS, st.integers(1, 200))
def test_rows_with_their_padding_are_within_the_budget(lengths, budget):
    bins = rows_by_budget(lengths, budget)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(b and (len(b) == 1 or len(b) * max(lengths[i] for i in b) <= budget) for b in bins)
    for one, other in zip(bins, bins[1:], strict=False):
        assert min(lengths[i] for i in one) >= max(lengths[i] for i in other), "similar lengths share a bin"
        assert (len(one) + 1) * max(lengths[i] for i in one) > budget, "nothing more fits"


def test_a_group_stays_together_where_it_fits():
    samples = [PackedSample(prompt, 9, 5) for prompt in (b"a", b"b", b"a", b"b")]
    assert sorted(map(sorted, pack_by_budget(samples, 19))) == [[0, 2], [1, 3]]


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=6), max_size=5), st.integers(0, 12))
def test_splitting_keeps_every_item_and_enlarges_nothing(bins, more):
    count = len(bins) + more
    parts = split_to_count(bins, count)
    assert len(parts) == count
    assert sorted(i for p in parts for i in p) == sorted(i for b in bins for i in b)
    assert all(not p or any(set(p) <= set(b) for b in bins) for p in parts)
    assert all(parts) or all(len(p) <= 1 for p in parts), "nothing is empty while something can be halved"


@given(LENGTHS, st.integers(1, 8))
def test_parts_cover_each_index_once(weights, parts):
    partition = balanced_partition(weights, parts)
    assert len(partition) == parts
    assert sorted(i for part in partition for i in part) == list(range(len(weights)))
    assert partition == balanced_partition(list(weights), parts)


@given(LENGTHS, st.integers(1, 8))
def test_parts_differ_by_at_most_the_largest_weight(weights, parts):
    sums = [sum(weights[i] for i in part) for part in balanced_partition(weights, parts)]
    assert max(sums) - min(sums) <= max(weights, default=0)


@given(st.integers(1, 8), st.integers(0, 5), st.integers(1, 50))
def test_equal_weights_are_shared_equally(parts, each, weight):
    assert all(len(part) == each for part in balanced_partition([weight] * (parts * each), parts))


def plainly_packed(samples, budget):
    """First-fit decreasing, bin by bin: the cheapest bin that has room, and the first of equally cheap ones."""
    longest = {}
    for sample in samples:
        longest[sample.prompt] = max(longest.get(sample.prompt, 0), sample.length)
    order = sorted(
        range(len(samples)), key=lambda i: (-longest[samples[i].prompt], samples[i].prompt, -samples[i].length, i)
    )
    bins = []
    for index in order:
        sample = samples[index]
        fitting = []
        for number, members in enumerate(bins):
            cost = sample.response if sample.prompt in {samples[i].prompt for i in members} else sample.length
            if packed_tokens([samples[i] for i in members]) + cost <= budget:
                fitting.append((cost, number))
        if fitting:
            bins[min(fitting)[1]].append(index)
        else:
            bins.append([index])
    return bins


@settings(max_examples=300, deadline=None)
@given(SAMPLES, st.integers(1, 100))
def test_bins_are_those_of_the_plain_method(samples, budget):
    assert pack_by_budget(samples, budget) == plainly_packed(samples, budget)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SAMPLES, st.integers(0, 3)), max_size=4), st.integers(1, 100))
def test_shares_are_packed_as_each_alone(given_shares, budget):
    samples = [sample for share, _ in given_shares for sample in share]
    ends = np.cumsum([len(share) for share, _ in given_shares]).tolist()
    shares = [range(end - len(share), end) for end, (share, _) in zip(ends, given_shares, strict=True)]
    alone = [[[r[i] for i in b] for b in plainly_packed([samples[i] for i in r], budget)] for r in shares]
    assert pack_shares(columns_of(samples), shares, budget) == alone


def plainly_balanced(weights, parts):
    """The largest differencing method as published, with every empty part, and every weight in the heap."""
    heap = []
    for index, weight in enumerate(weights):
        empty = [(0, []) for _ in range(parts - 1)]
        heapq.heappush(heap, (-weight if parts > 1 else 0, index, [(weight, [index]), *empty]))
    age = len(weights)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
        age += 1
    return [sorted(items) for _, items in heap[0][2]] if heap else [[] for _ in range(parts)]


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 60).flatmap(lambda most: st.lists(st.integers(1, most), max_size=40)), st.integers(1, 12))
def test_parts_are_those_of_the_plain_method(weights, parts):
    assert balanced_partition(weights, parts) == plainly_balanced(weights, parts)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 60), st.integers(0, 30), st.integers(50, 300)).flatmap(
        lambda t: st.lists(st.integers(t[0], t[0] + t[1]), min_size=t[2], max_size=t[2])
    ),
    st.integers(2, 110),
)
def test_many_parts_are_those_of_the_plain_method(weights, parts):
    assert WIDE < 110, "both ways to merge are meant"
    assert balanced_partition(weights, parts) == plainly_balanced(weights, parts)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 400), st.integers(1, 90), st.lists(st.integers(1, 9), max_size=20))
def test_equal_weights_are_merged_as_in_the_plain_method(equal, parts, others):
    weights = [7] * equal + others
    assert balanced_partition(weights, parts) == plainly_balanced(weights, parts)
