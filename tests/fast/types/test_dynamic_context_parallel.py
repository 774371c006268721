"""Dynamic context parallelism: the smallest size that fits, every sequence once, no group idle without need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.types.dims import possible_sizes
from miles.types.parallel import padded_length, plan_dynamic_context_parallel

RANKS = st.sampled_from([1, 2, 3, 4, 6, 8])
BUDGET = 16


@st.composite
def steps(draw):
    ranks, budget = draw(RANKS), draw(st.integers(2, 20))
    size = possible_sizes(ranks)[-1]
    longest = budget * size if size == 1 else budget * size // (2 * size) * 2 * size
    return ranks, budget, draw(st.lists(st.integers(1, longest), max_size=30))


@given(steps())
def test_every_sequence_once_within_the_budget(step):
    ranks, budget, lengths = step
    plan = plan_dynamic_context_parallel(lengths, ranks, budget)
    assert sorted(i for micro in plan for group in micro.groups for i in group) == list(range(len(lengths)))
    for micro in plan:
        assert len(micro.groups) * micro.size == ranks
        for group in micro.groups:
            assert sum(padded_length(lengths[i], micro.size) for i in group) <= budget * micro.size


@given(steps())
def test_the_size_is_the_smallest_that_fits_and_fills_the_groups(step):
    ranks, budget, lengths = step
    for micro in plan_dynamic_context_parallel(lengths, ranks, budget):
        members = [i for group in micro.groups for i in group]
        # A group is empty only if the next size has no room for its padding, or there is no next size.
        wider = sum(padded_length(lengths[i], 2 * micro.size) for i in members)
        largest = micro.size == possible_sizes(ranks)[-1]
        assert all(micro.groups) or largest or wider > budget * micro.size
        if micro.size > 1:
            half = micro.size // 2
            longest = max(lengths[i] for i in members)
            assert padded_length(longest, half) > budget * half or len(members) < ranks // half


@given(st.integers(1, 40), RANKS)
def test_equal_sequences_are_spread_evenly(count, ranks):
    for micro in plan_dynamic_context_parallel([BUDGET // 4] * count, ranks, BUDGET):
        sizes = [len(group) for group in micro.groups]
        assert max(sizes) - min(sizes) <= 1


def test_a_sequence_for_which_there_are_too_few_ranks():
    with pytest.raises(
        ValueError, match=r"--max-seqlen-per-dp-cp-rank 16: a sequence of 65 tokens .* 4 ranks.*give at least 18"
    ):
        plan_dynamic_context_parallel([65], 4, BUDGET)


def test_no_room_for_padding_leaves_a_group_empty():
    (micro,) = plan_dynamic_context_parallel([3, 3, 3], ranks=4, max_seqlen_per_rank=3)
    assert micro.size == 1 and sorted(map(len, micro.groups)) == [0, 1, 1, 1]
