"""How samples of known length are put together: into few bins of a budget, or into k parts of equal weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class PackedSample(NamedTuple):
    """What packing needs of a sample: which prompt it has, and the tokens of prompt and response."""

    prompt: bytes  # samples of equal prompts may share its tokens
    prompt_length: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of the sample where it stands alone."""
        return self.prompt_length + self.response


def pack_by_budget(samples: Sequence[PackedSample], budget: int) -> list[list[int]]:
    """Indices of ``samples`` in bins of at most ``budget`` packed tokens, by first-fit decreasing (Johnson 1973).

    A prompt that stands in a bin already costs nothing there, so samples of one prompt are taken one after the other,
    and prefer the bin of their prompt. A sample longer than the budget gets a bin of its own.

    >>> group = [PackedSample(b"p", 30, 10)] * 4
    >>> pack_by_budget(group, 70), pack_by_budget(group, 60)
    ([[0, 1, 2, 3]], [[0, 1, 2], [3]])
    """
    longest: dict[bytes, int] = {}
    for sample in samples:
        longest[sample.prompt] = max(longest.get(sample.prompt, 0), sample.length)
    order = sorted(
        range(len(samples)), key=lambda i: (-longest[samples[i].prompt], samples[i].prompt, -samples[i].length, i)
    )
    bins: list[list[int]] = []
    room: list[int] = []
    prompts: list[set[bytes]] = []
    for index in order:
        sample = samples[index]
        costs = (sample.response if sample.prompt in held else sample.length for held in prompts)
        fitting = [(cost, b) for b, (cost, left) in enumerate(zip(costs, room, strict=True)) if cost <= left]
        if fitting:
            cost, chosen = min(fitting)
        else:
            cost, chosen = sample.length, len(bins)
            bins.append([])
            room.append(budget)
            prompts.append(set())
        bins[chosen].append(index)
        room[chosen] -= cost
        prompts[chosen].add(sample.prompt)
    return bins


def rows_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in bins of at most ``budget`` tokens where each is padded to the longest of its bin.

    Longest first, so that those of similar length stand together. A sample longer than the budget gets a bin of its
    own.

    >>> rows_by_budget([10, 40, 38, 12, 9], 80)
    [[1, 2], [3, 0, 4]]
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
            bins.append([])
        bins[-1].append(index)
    return bins


def split_to_count(bins: Sequence[list[int]], count: int) -> list[list[int]]:
    """``bins`` cut until there are ``count``: the one of most samples is halved; empty ones where nothing can be.

    No bin grows, so none that kept a budget exceeds it.
    """
    parts = [list(part) for part in bins]
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda b: len(parts[b]), default=None)
        middle = 0 if largest is None else len(parts[largest]) // 2
        if largest is None or middle == 0:
            parts.append([])
        else:
            parts.append(parts[largest][middle:])
            parts[largest] = parts[largest][:middle]
    return parts


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
