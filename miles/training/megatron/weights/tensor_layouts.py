"""How one Megatron parameter is made of Hugging Face tensors, and how it is cut over the tensor-parallel ranks.

Every layout only moves numbers: both ways are exact, and one is the inverse of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class TensorLayout(Protocol):
    """``from_hf`` and ``to_hf`` take and give the tensors in the order in which the parameter names them."""

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """The shard of tensor-parallel rank ``rank`` of ``size``, from whole Hugging Face tensors."""
        ...

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Whole Hugging Face tensors from the shards of all ranks, in order."""
        ...


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of it: norms, the router."""

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return tensors[0]

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [shards[0]]


@dataclass(frozen=True)
class Split:
    """Cut along ``dim``: rows of a column-parallel weight (0), columns of a row-parallel one (1)."""

    dim: int

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return tensors[0].chunk(size, self.dim)[rank]

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards), self.dim)]


@dataclass(frozen=True)
class SwappedColumns:
    """Cut by rows, with the two halves of the columns in the other order."""

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        first, second = tensors[0].chunk(size)[rank].chunk(2, 1)
        return torch.cat([second, first], 1)

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        first, second = torch.cat(list(shards)).chunk(2, 1)
        return [torch.cat([second, first], 1)]


@dataclass(frozen=True)
class Vocabulary:
    """Rows of the embedding or the head, of ``tokens`` tokens; zeros fill them up to a multiple of the ranks."""

    tokens: int

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        (whole,) = tensors
        rows = -(-self.tokens // size)
        shard = whole[rank * rows : (rank + 1) * rows]
        return torch.cat([shard, shard.new_zeros(rows - len(shard), whole.shape[1])])

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(shards))[: self.tokens]]


@dataclass(frozen=True)
class GateUp:
    """A gated MLP's first matrix: each rank has its rows of the gate, then its rows of the up projection."""

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        halves = [shard.chunk(2) for shard in shards]
        return [torch.cat([gate for gate, _ in halves]), torch.cat([up for _, up in halves])]


@dataclass(frozen=True)
class QueryKeyValue:
    """Attention's first matrix, or its bias: for each group of query heads those heads, then its key, then its value.

    Ranks have whole groups where there are at least as many groups as ranks, and equal parts of the rows otherwise.
    """

    heads: int
    groups: int
    width: int

    def from_hf(self, tensors: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        by_group = [tensor.reshape(self.groups, -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(by_group, 1).flatten(0, 1).chunk(size)[rank]

    def to_hf(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        whole = torch.cat(list(shards))
        by_group = whole.reshape(self.groups, -1, *whole.shape[1:])
        rows = (self.heads // self.groups * self.width, self.width, self.width)
        return [part.flatten(0, 1) for part in by_group.split(rows, 1)]
