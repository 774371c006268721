"""Divide samples over ranks so that all have nearly the same number of tokens."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(slots=True)
class _Partition:
    """The parts that have an item, largest first; the others, up to the number of parts, are empty.

    ``sums`` are negative: they ascend, as ``bisect`` wants them. A part is named by the first of its items.
    """

    sums: list[int]
    named: list[int]

    def spread(self, parts: int) -> int:
        """Return the difference of the largest and the smallest of ``parts``."""
        return (self.sums[-1] if len(self.sums) == parts else 0) - self.sums[0]


class _Chains:
    """The items of all parts as chains, so that two parts are joined without a copy."""

    def __init__(self, items: int) -> None:
        self._following = [-1] * items
        self._last = list(range(items))  # of the chain that begins with an item

    def join(self, one: int, other: int) -> int:
        """Return the name of both parts together."""
        self._following[self._last[one]] = other
        self._last[one] = self._last[other]
        return one

    def items(self, name: int) -> list[int]:
        """Return the items of a part, in ascending order."""
        found = []
        while name >= 0:
            found.append(name)
            name = self._following[name]
        found.sort()
        return found


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return indices of ``weights`` in ``parts`` lists of nearly equal sum; some are empty if there are more parts.

    This is the largest differencing method (Karmarkar and Karp, 1982): the two partitions whose largest and smallest
    parts differ most are merged, largest part with smallest, until one partition is left. At first every weight is a
    partition. Of equal differences the older partition goes first, so the result depends on the weights only.

    Weights are positive. With thousands of parts and a million weights, three things keep this fast: empty parts are
    not stored; weights wait in one sorted list, as only merged partitions need the heap; and a partition that remains
    the one with the largest difference takes weight after weight without going through the heap.
    """
    if not weights or parts == 1:
        return [list(range(len(weights))), *([] for _ in range(parts - 1))]
    column = np.asarray(weights, dtype=np.int64)
    assert column.min() > 0, "a part of weight 0 would be taken for an empty one"
    order = np.argsort(-column, kind="stable")
    items, waiting = order.tolist(), (-column[order]).tolist()  # negative, ascending
    chains = _Chains(len(items))
    at, end = 0, len(items)  # those before ``at`` are in partitions
    merged: list[tuple[int, int, _Partition]] = []  # a heap of (-spread, age, partition)
    age = 0
    while end - at + len(merged) > 1:
        # A weight is older than every merged partition, and so goes first if the differences are equal.
        if at < end and (not merged or waiting[at] <= merged[0][0]):
            first = _Partition([waiting[at]], [items[at]])
            at += 1
        else:
            first = heapq.heappop(merged)[2]
        least = merged[0][0] if merged else 0  # what a weight needs, to be the second
        if at == end or waiting[at] > least:
            first = _merge(first, heapq.heappop(merged)[2], parts, chains)
        while at < end and waiting[at] <= least:
            _add(first, waiting[at], items[at], parts, chains)
            at += 1
            room = parts - len(first.sums)
            if room and at < end and first.sums[0] < waiting[at]:  # it stays first until no part is empty
                taken = min(at + room, bisect_right(waiting, least, at))
                first.sums += waiting[at:taken]
                first.named += items[at:taken]
                at = taken
            if at < end and first.spread(parts) <= -waiting[at]:
                break
        age += 1
        heapq.heappush(merged, (-first.spread(parts), age, first))
    found = [chains.items(name) for name in merged[0][2].named] if merged else [[items[0]]]
    return found + [[] for _ in range(parts - len(found))]


def _add(partition: _Partition, weight: int, item: int, parts: int, chains: _Chains) -> None:
    """Put an item of a negative weight into the smallest part. Of equal parts, the changed one becomes the last."""
    sums, named = partition.sums, partition.named
    if len(sums) == parts:
        weight += sums.pop()
        item = chains.join(named.pop(), item)
    place = bisect_right(sums, weight)
    sums.insert(place, weight)
    named.insert(place, item)


def _merge(first: _Partition, second: _Partition, parts: int, chains: _Chains) -> _Partition:
    """Put the largest part of one with the smallest of the other, and so on.

    Of equal results the one with the larger part of ``first`` goes first.
    """
    a, b = first.sums, second.sums
    alone = min(len(a), parts - len(b))  # of the first, that meet an empty part of the second
    left = parts - max(len(a), parts - len(b))  # of the second, that meet an empty part of the first
    sums, named = a[:alone], first.named[:alone]
    for i in range(alone, len(a)):
        sums.append(a[i] + b[parts - 1 - i])
        named.append(chains.join(first.named[i], second.named[parts - 1 - i]))
    sums += b[:left][::-1]
    named += second.named[:left][::-1]
    if len(a) + len(b) <= parts and a[0] == a[-1] == b[0] == b[-1]:  # equal weights, one in each part
        return _Partition(sums, named)
    order = sorted(range(len(sums)), key=sums.__getitem__)
    return _Partition([sums[i] for i in order], [named[i] for i in order])
