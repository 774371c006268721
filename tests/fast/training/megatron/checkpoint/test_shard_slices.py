"""The slices of a range of a flattened tensor: each element once, in order, in few slices."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def shard_slices() -> Callable[..., Any]:
    from miles.training.megatron.checkpoint import shard_slices  # imports Megatron, which takes seconds

    return shard_slices


@pytest.mark.parametrize("shape", [(7,), (3, 5), (1, 4), (4, 1), (2, 3, 4), (2, 2, 2, 2)])
def test_boxes_fill_every_range(shard_slices: Callable[..., Any], shape: tuple[int, ...]) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    for begin, end in combinations(range(numbers.size + 1), 2):
        boxes = list(shard_slices(shape, begin, end))
        assert len(boxes) <= 2 * len(shape) - 1
        inside = []
        for offsets, sizes, first in boxes:
            box = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            assert box.shape == sizes and box.flat[0] == first
            inside += box.ravel().tolist()
        assert inside == list(range(begin, end))


def test_an_empty_range_has_no_boxes(shard_slices: Callable[..., Any]) -> None:
    assert not list(shard_slices((3, 5), 4, 4)) and not list(shard_slices((3, 5), 9, 2))
