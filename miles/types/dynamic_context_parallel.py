"""Dynamic context parallelism: every micro-batch is divided among as few ranks as its longest sequence needs.

Under a static size, short sequences are cut as finely as the longest one of the run needs, and exchange keys and values
for nothing. Here every micro-batch has its own size, a power of two. The ranks form groups of that size, and each group
has its own sequences. Every token is still on exactly one rank, so the loss does not depend on the sizes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from miles.types.context_parallel import padded_length
from miles.types.dims import possible_sizes


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
