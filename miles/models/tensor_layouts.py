"""Convert Hugging Face tensors to Megatron parameters, and cut these over the tensor-parallel ranks.

Layouts only move numbers: both directions are exact, and each is the inverse of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class TensorLayout(Protocol):
    """Both directions take and return Hugging Face tensors in the order of their names in a ``Binding``."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the shard of tensor-parallel rank ``rank`` of ``size``, from whole Hugging Face tensors."""
        ...

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return whole Hugging Face tensors from the shards of all ranks, in order."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every rank holds all of it: norms, the router."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the tensor."""
        return tensors[0]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the first rank's."""
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Cut along ``dim``: rows of a column-parallel weight (0), columns of a row-parallel one (1)."""

    dim: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's equal part."""
        return tensors[0].chunk(size, self.dim)[rank]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the parts."""
        return [_join(shards, self.dim)]


@dataclass(frozen=True)
class SwappedColumns:
    """Cut by rows, with the two halves of the columns in the other order."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows, halves swapped."""
        first, second = tensors[0].chunk(size)[rank].chunk(2, 1)
        return _join([second, first], 1)

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the rows and swap the halves back."""
        first, second = _join(shards).chunk(2, 1)
        return [_join([second, first], 1)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the embedding or the head, one per token of ``tokens``, padded with zeros to a multiple of the ranks."""

    tokens: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows, with its part of the padding."""
        (whole,) = tensors
        rows = -(-self.tokens // size)
        shard = whole[rank * rows : (rank + 1) * rows]
        return _join([shard, shard.new_zeros(rows - len(shard), whole.shape[1])])

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Join the rows and drop the padding."""
        return [_join(shards)[: self.tokens]]


@dataclass(frozen=True)
class GateUp:
    """The first matrix of a gated MLP: each rank has its rows of the gate, then its rows of the up projection."""

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows of both."""
        return _join([tensor.chunk(size)[rank] for tensor in tensors])

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return gate and up projection."""
        halves = [shard.chunk(2) for shard in shards]
        return [_join([gate for gate, _ in halves]), _join([up for _, up in halves])]


@dataclass(frozen=True)
class QueryKeyValue:
    """The first matrix of attention, or its bias: for each key head its query heads, then the key, then the value.

    Ranks hold whole groups if there are at least as many groups as ranks, and equal parts of the rows otherwise.
    """

    heads: int
    groups: int
    width: int

    def from_hf(self, tensors: Sequence[Tensor], rank: int, size: int) -> Tensor:
        """Return the rank's rows of query, key and value, interleaved by group."""
        by_group = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return _join(by_group, 1).flatten(0, 1).chunk(size)[rank]

    def to_hf(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return query, key and value."""
        whole = _join(shards)
        by_group = whole.reshape(self.groups, -1, *whole.shape[1:])
        rows = [self.heads // self.groups * self.width, self.width, self.width]
        parts: Sequence[Tensor] = by_group.split(rows, 1)
        return [part.flatten(0, 1) for part in parts]


def _join(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    import torch  # not at the top: validation reads the families, and takes no torch

    return torch.cat(list(tensors), dim)
