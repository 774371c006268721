"""Ranges of a flattened tensor as boxes of it. No torch, no Megatron."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

ShardSlice: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


def shard_slices(shape: Sequence[int], begin: int, end: int) -> Iterator[ShardSlice]:
    """The boxes that elements ``begin`` to ``end`` of a tensor fill, counted row by row: offsets, sizes, and the number
    of the first element. A matrix has at most three: the end of a row, whole rows, the beginning of a row."""
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,), begin
        return
    inner = tuple(shape[1:])
    row = prod(inner)
    first, last = -(-begin // row), end // row  # whole rows
    if begin < min(first * row, end):
        yield from _in_row(inner, first - 1, begin, min(first * row, end))
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner), first * row
    if max(first, last) * row < end:
        yield from _in_row(inner, last, last * row, end)


def _in_row(inner: tuple[int, ...], number: int, begin: int, end: int) -> Iterator[ShardSlice]:
    before = number * prod(inner)
    for offsets, sizes, at in shard_slices(inner, begin - before, end - before):
        yield (number, *offsets), (1, *sizes), before + at
