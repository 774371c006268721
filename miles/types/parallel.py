"""Context parallelism: which positions of a sequence each rank holds, and how many ranks share a micro-batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles.types.dims import possible_sizes

# Zig-zag context parallelism: the positions of a shared sequence that each rank of a group holds.
#
# A sequence is padded to a multiple of ``2 * size`` and cut into ``2 * size`` chunks. Rank r holds chunk r and its
# mirror image, chunk ``2 * size - 1 - r``. A late chunk attends to many keys and an early one to few, so every rank
# has the same work. Llama 3 (arXiv 2407.21783 §3.3.2) and Megatron-Core's ``get_batch_on_this_cp_rank`` use the same
# layout.


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
    return np.concatenate([np.arange(c * chunk, (c + 1) * chunk, dtype=np.int64) for c in zigzag_chunks(size, rank)])


def gathered_index(lengths: Sequence[int], size: int) -> np.ndarray:
    """Return the index of every position of every sequence in the packed tokens of all ranks, rank after rank.

    int64 [sum of padded lengths], sequence after sequence, each in the order of its positions.

    >>> gathered_index([7], 2).tolist()
    [0, 1, 4, 5, 6, 7, 2, 3]
    """
    local = [padded_length(length, size) // size for length in lengths]
    starts = np.concatenate([[0], np.cumsum(local)]).astype(np.int64)
    parts = []
    for length, start, held in zip(lengths, starts, local, strict=False):
        where = np.empty(padded_length(length, size), np.int64)
        for rank in range(size):
            where[zigzag_positions(length, size, rank)] = rank * starts[-1] + start + np.arange(held)
        parts.append(where)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# Dynamic context parallelism: every micro-batch is divided among as few ranks as its longest sequence needs.
#
# Under a static size, short sequences are cut as finely as the longest one of the run needs, and exchange keys and
# values for nothing. Here every micro-batch has its own size, a power of two. The ranks form groups of that size, and
# each group has its own sequences. Every token is still on exactly one rank, so the loss does not depend on the sizes.


@dataclass(frozen=True)
class GroupedMicroBatch:
    """One micro-batch on all ranks: ``groups[g]`` are the sequences of ranks ``g * size`` to ``(g + 1) * size - 1``."""

    size: int
    groups: list[list[int]]


def plan_dynamic_context_parallel(
    lengths: Sequence[int], ranks: int, max_seqlen_per_rank: int
) -> list[GroupedMicroBatch]:
    """Cut sequences of ``lengths`` into micro-batches of at most ``max_seqlen_per_rank`` tokens per rank.

    The longest remaining sequence sets the size: the smallest that can hold it. Shorter sequences fill the rest of the
    budget, each in the group with the fewest tokens. If there are fewer sequences than groups, the size is doubled
    until every group has one, as far as the budget allows.

    Raises:
        ValueError: The largest group cannot hold a sequence.

    >>> plan_dynamic_context_parallel([16, 3, 3, 2, 2, 2], ranks=4, max_seqlen_per_rank=4)
    [GroupedMicroBatch(size=4, groups=[[0]]), GroupedMicroBatch(size=1, groups=[[1], [2], [3, 5], [4]])]
    """
    sizes = possible_sizes(ranks)
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan = []
    while left:
        size = _smallest_size(lengths[left[0]], sizes, max_seqlen_per_rank)
        groups, later = _fill(left, lengths, size, ranks // size, max_seqlen_per_rank)
        placed = sorted((i for group in groups for i in group), key=lambda i: (-lengths[i], i))
        while len(placed) < ranks // size and size < sizes[-1]:
            wider, rest = _fill(placed, lengths, 2 * size, ranks // (2 * size), max_seqlen_per_rank)
            if rest:  # padding for wider groups exceeds the budget: leave a group empty
                break
            size, groups = 2 * size, wider
        plan.append(GroupedMicroBatch(size, groups))
        left = later
    return plan


def _smallest_size(length: int, sizes: Sequence[int], max_seqlen_per_rank: int) -> int:
    for size in sizes:
        if padded_length(length, size) <= max_seqlen_per_rank * size:
            return size
    raise ValueError(
        f"--max-seqlen-per-dp-cp-rank {max_seqlen_per_rank}: a sequence of {length} tokens does not fit on "
        f"{sizes[-1]} ranks, the most that can share a sequence; give at least {-(-length // (2 * sizes[-1])) * 2}, "
        "or shorten prompts and responses"
    )


def _fill(
    candidates: Sequence[int], lengths: Sequence[int], size: int, groups: int, max_seqlen_per_rank: int
) -> tuple[list[list[int]], list[int]]:
    """Put ``candidates``, longest first, each into the group with the fewest tokens.

    Returns:
        The groups, and the candidates that do not fit.
    """
    chosen: list[list[int]] = [[] for _ in range(groups)]
    loads = [(0, group) for group in range(groups)]
    later = []
    for index in candidates:
        load, group = loads[0]
        load += padded_length(lengths[index], size)
        if load <= max_seqlen_per_rank * size:
            heapq.heapreplace(loads, (load, group))
            chosen[group].append(index)
        else:
            later.append(index)
    return chosen, later
