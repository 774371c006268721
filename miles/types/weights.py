"""Group weights into chunks, and pack a chunk so that it crosses processes without a copy per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:  # the launcher handles weights by reference, and torch takes seconds to import
    import torch

T = TypeVar("T")

BUCKET_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class WeightChunk:
    """Hold full, unsharded tensors by their Hugging Face names: one part of a weight update."""

    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def in_buckets(items: Iterable[tuple[str, T]], size_of: Callable[[T], int], limit: int) -> Iterator[dict[str, T]]:
    """Group ``items`` in order into buckets of at most ``limit`` bytes; a larger item is its own bucket."""
    bucket: dict[str, T] = {}
    total = 0
    for name, item in items:
        size = size_of(item)
        if bucket and total + size > limit:
            yield bucket
            bucket, total = {}, 0
        bucket[name] = item
        total += size
    if bucket:
        yield bucket


def in_chunks(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightChunk]:
    """Group ``weights`` in order into chunks of at most ``bucket_bytes``; a larger tensor is its own chunk."""
    return map(WeightChunk, in_buckets(weights, lambda tensor: tensor.nbytes, bucket_bytes))


@dataclass(frozen=True)
class PackedChunk:
    """Hold a chunk as NumPy bytes, which an object store shares between the processes of a node without copying."""

    entries: dict[str, tuple[str, tuple[int, ...], np.ndarray]]  # name: (dtype name, shape, bytes)


def pack(chunk: WeightChunk) -> PackedChunk:
    """Pack a chunk. NumPy has no bfloat16, hence bytes and a dtype name."""
    import torch

    entries = {}
    for name, tensor in chunk.tensors.items():
        flat = tensor.contiguous().reshape(-1)
        entries[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())
    return PackedChunk(entries)


def unpack(packed: PackedChunk) -> WeightChunk:
    """Return the tensors, on the store's read-only memory: copy from them, never write to them."""
    import torch

    tensors = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, (dtype, shape, data) in packed.entries.items():
            tensors[name] = torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
    return WeightChunk(tensors)
