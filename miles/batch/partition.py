"""Divide samples over ranks so that all have nearly the same number of tokens."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MANY = 8  # equal weights that are merged at a time rather than one by one
WIDE = 64  # parts of a partition that are merged as arrays; for fewer a loop is faster


def _column(numbers: np.ndarray) -> array[int]:
    """Return ``numbers`` in a form that grows and gives single numbers fast; numpy reads it without a copy."""
    column = array("q")
    column.frombytes(numbers.astype(np.int64, copy=False).tobytes())
    return column


def _view(column: array[int]) -> np.ndarray:
    """Return the numbers of ``column``, which must not grow while they are used."""
    return np.frombuffer(column, np.int64)


@dataclass(slots=True)
class _Partition:
    """The parts that have an item, largest first; the others, up to the number of parts, are empty.

    ``sums`` are negative: they ascend, as ``bisect`` wants them. A part is named by the first of its items.
    """

    sums: array[int]
    named: array[int]

    def spread(self, parts: int) -> int:
        """Return the difference of the largest and the smallest of ``parts``."""
        return (self.sums[-1] if len(self.sums) == parts else 0) - self.sums[0]


class _Chains:
    """The items of all parts as chains, so that two parts are joined without a copy."""

    def __init__(self, items: int) -> None:
        self._following = _column(np.full(items, -1))
        self._last = _column(np.arange(items))  # of the chain that begins with an item
        self._followings, self._lasts = _view(self._following), _view(self._last)

    def join(self, one: int, other: int) -> int:
        """Return the name of both parts together."""
        self._following[self._last[one]] = other
        self._last[one] = self._last[other]
        return one

    def join_each(self, ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Join each of ``ones`` with the one of ``others`` at its place; return the names."""
        self._followings[self._lasts[ones]] = others
        self._lasts[ones] = self._lasts[others]
        return ones

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

    Weights are positive. With thousands of parts and a million weights, these keep it fast: empty parts are not stored;
    weights wait in one sorted column, as only merged partitions need the heap; a partition that remains the one with
    the largest difference takes weight after weight without going through the heap; equal weights are merged many at a
    time (``_equal_weights``), and partitions of many parts as arrays.
    """
    if not weights or parts == 1:
        return [list(range(len(weights))), *([] for _ in range(parts - 1))]
    column = np.asarray(weights, dtype=np.int64)
    assert column.min() > 0, "a part of weight 0 would be taken for an empty one"
    order = np.argsort(-column, kind="stable")
    items, waiting = _column(order), _column(-column[order])  # weights are negative, ascending
    chains = _Chains(len(items))
    at, end = 0, len(items)  # those before ``at`` are in partitions
    merged: list[tuple[int, int, _Partition]] = []  # a heap of (-spread, age, partition)
    age = 0
    while end - at + len(merged) > 1:
        equal = bisect_right(waiting, waiting[at], at) - at if at < end else 0
        if equal >= MANY and (not merged or waiting[at] < merged[0][0]):  # they come before everything else
            for names in _equal_weights(order[at : at + equal], parts):
                age += 1
                alike = _Partition(array("q", [waiting[at]]) * len(names), _column(names))
                heapq.heappush(merged, (waiting[at], age, alike))
            at += equal
            continue
        # A weight is older than every merged partition, and so goes first if the differences are equal.
        if at < end and (not merged or waiting[at] <= merged[0][0]):
            first = _Partition(waiting[at : at + 1], items[at : at + 1])
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


def _equal_weights(items: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return the partitions that equal weights become among themselves, oldest first, each as the names of its parts.

    Every part has one item, so the difference of each partition is the weight. They are merged in rounds: oldest with
    second oldest, third with fourth, and so on; one that is left over is the oldest of the next round. A merger is the
    first partition's parts, then the second's in reverse order, as in ``_merge``: the array of all names stays as it
    is, but that every second partition in it is reversed. Rounds end when a merger would have no part empty.
    """
    sizes = np.ones(len(items), np.int64)
    while len(sizes) > 1:
        pairs = len(sizes) // 2
        merged = sizes[0 : 2 * pairs : 2] + sizes[1 : 2 * pairs : 2]
        if merged.max() >= parts:
            break
        ends = np.cumsum(sizes)
        whole = ends[2 * pairs - 1]  # the names of pairs
        reflect = np.repeat((2 * ends - sizes - 1)[: 2 * pairs], sizes[: 2 * pairs])
        is_second = np.repeat(np.arange(2 * pairs) % 2 == 1, sizes[: 2 * pairs])
        places = np.arange(whole)
        paired = items[np.where(is_second, reflect - places, places)]
        items = np.concatenate([items[whole:], paired])
        sizes = np.concatenate([sizes[2 * pairs :], merged])
    return np.split(items, np.cumsum(sizes)[:-1])


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
    if len(a) + len(b) > WIDE:
        return _merge_wide(first, second, alone, left, parts, chains)
    sums, named = a[:alone], first.named[:alone]
    for i in range(alone, len(a)):
        sums.append(a[i] + b[parts - 1 - i])
        named.append(chains.join(first.named[i], second.named[parts - 1 - i]))
    sums += b[:left][::-1]
    named += second.named[:left][::-1]
    if len(a) + len(b) <= parts and a[0] == a[-1] == b[0] == b[-1]:  # equal weights, one in each part
        return _Partition(sums, named)
    order = sorted(range(len(sums)), key=sums.__getitem__)
    return _Partition(array("q", [sums[i] for i in order]), array("q", [named[i] for i in order]))


def _merge_wide(
    first: _Partition, second: _Partition, alone: int, left: int, parts: int, chains: _Chains
) -> _Partition:
    """Do what ``_merge`` does, with arrays."""
    a, b, a_named, b_named = map(_view, (first.sums, second.sums, first.named, second.named))
    met = slice(parts - len(a), parts - alone)  # of the second, by the first's parts from ``alone`` on, last first
    joined = chains.join_each(a_named[alone:], b_named[met][::-1])
    sums = np.concatenate([a[:alone], a[alone:] + b[met][::-1], b[:left][::-1]])
    named = np.concatenate([a_named[:alone], joined, b_named[:left][::-1]])
    order = np.argsort(sums, kind="stable")
    return _Partition(_column(sums[order]), _column(named[order]))
