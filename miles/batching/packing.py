"""Two ways to put samples of known length together: into few bins of a budget, or into k parts of equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins of at most ``budget`` tokens, by first-fit decreasing (Johnson 1973).

    A sample longer than the budget gets a bin of its own. First fit uses at most 11/9 of the fewest bins, plus one.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, left in enumerate(room) if lengths[index] <= left), None)
        if fits is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fits].append(index)
            room[fits] -= lengths[index]
    return bins


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``parts`` lists of nearly equal sum, some empty when the parts outnumber the items.

    The largest differencing method (Karmarkar and Karp, 1982): the two partitions whose largest and smallest parts
    differ most are merged, largest part onto smallest, until one is left.
    """
    if not weights:
        return [[] for _ in range(parts)]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(parts - 1)]
        spread = weight if parts > 1 else 0
        heapq.heappush(heap, (-spread, index, [(weight, [index]), *empty]))
    ticket = len(weights)  # breaks ties, so that the result depends on nothing but the weights
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], ticket, merged))
        ticket += 1
    return [sorted(items) for _, items in heap[0][2]]
