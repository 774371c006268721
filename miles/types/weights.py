"""Group weights into chunks, and pack a chunk so that it crosses processes without a copy per tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # the launcher handles weights by reference, and torch takes seconds to import
    import torch

BUCKET_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class WeightChunk:
    """Hold full, unsharded tensors by their Hugging Face names: one part of a weight update."""

    tensors: dict[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def in_chunks(weights: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES) -> Iterator[WeightChunk]:
    """Group ``weights`` in order into chunks of at most ``bucket_bytes``; a larger tensor is its own chunk."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield WeightChunk(bucket)
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield WeightChunk(bucket)


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
