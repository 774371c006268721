"""Zig-zag context parallelism: the positions of a shared sequence that each rank of a group holds.

A sequence is padded to a multiple of ``2 * size`` and cut into ``2 * size`` chunks. Rank r holds chunk r and its mirror
image, chunk ``2 * size - 1 - r``. A late chunk attends to many keys and an early one to few, so every rank has the same
work. Llama 3 (arXiv 2407.21783 §3.3.2) and Megatron-Core's ``get_batch_on_this_cp_rank`` use the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def padded_length(length: int, size: int) -> int:
    """Return how many tokens a sequence of ``length`` takes on all ``size`` ranks together, padding included.

    >>> padded_length(5, 1), padded_length(5, 2), padded_length(8, 2)
    (5, 8, 8)
    """
    return length if size == 1 else -(-length // (2 * size)) * 2 * size


def zigzag_chunks(size: int, rank: int) -> tuple[int, int]:
    """Return which two of the ``2 * size`` chunks of a sequence ``rank`` holds, ascending."""
    return rank, 2 * size - 1 - rank


def zigzag_positions(length: int, size: int, rank: int) -> np.ndarray:
    """Return the positions that ``rank`` of ``size`` holds, ascending; int64 [padded_length / size].

    Positions from ``length`` on are padding.

    >>> [zigzag_positions(7, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if size == 1:
        return np.arange(length, dtype=np.int64)
    chunk = padded_length(length, size) // (2 * size)
    return np.concatenate(
        [np.arange(c * chunk, (c + 1) * chunk, dtype=np.int64) for c in zigzag_chunks(size, rank)],
    )


def gathered_index(lengths: Sequence[int], size: int) -> np.ndarray:
    """Return the index of every position of every sequence in the packed tokens of all ranks, rank after rank.

    int64 [sum of padded lengths], sequence after sequence, each in the order of its positions.

    >>> gathered_index([7], 2).tolist()
    [0, 1, 4, 5, 6, 7, 2, 3]
    """
    local = [padded_length(length, size) // size for length in lengths]
    starts = np.concatenate([[0], np.cumsum(local)]).astype(np.int64)
    parts = []
    for length, start, count in zip(lengths, starts, local, strict=False):
        where = np.empty(padded_length(length, size), np.int64)
        for rank in range(size):
            where[zigzag_positions(length, size, rank)] = rank * starts[-1] + start + np.arange(count)
        parts.append(where)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
