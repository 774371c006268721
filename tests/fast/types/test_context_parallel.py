"""The zig-zag layout: every position on one rank, and ranks of equal work."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.types.parallel import gathered_index, padded_length, zigzag_positions

SIZES = st.sampled_from([1, 2, 3, 4, 8])


@given(st.integers(1, 200), SIZES)
def test_every_position_is_on_one_rank(length, size):
    parts = [zigzag_positions(length, size, rank) for rank in range(size)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(padded_length(length, size)))
    assert len({len(part) for part in parts}) == 1
    assert 0 <= padded_length(length, size) - length < 2 * size


@given(st.integers(1, 200), st.sampled_from([2, 4, 8]))
def test_ranks_attend_to_equally_many_keys(length, size):
    work = [int((zigzag_positions(length, size, rank) + 1).sum()) for rank in range(size)]
    assert len(set(work)) == 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), SIZES)
def test_gathered_index_puts_every_sequence_back_in_order(lengths, size):
    """Positions laid out rank after rank, read through the index, count from 0 in every sequence."""
    everywhere = np.concatenate(
        [np.concatenate([zigzag_positions(n, size, rank) for n in lengths]) for rank in range(size)]
    )
    positions = everywhere[gathered_index(lengths, size)]
    wanted = np.concatenate([np.arange(padded_length(n, size)) for n in lengths])
    assert positions.tolist() == wanted.tolist()
