"""Megatron's ``torch_dist`` format, written by the training processes themselves, one tensor at a time.

Megatron's own strategy is made for saving in the background: it starts a server process on every rank, which a killed
run leaves behind, and forks writers from a process that has threads. What its ``sharded_state_dict`` gives a strategy
to write is gathered first: with a distributed optimizer every data-parallel rank (or the first) then has whole fp32
weights and moments beside its own state. Here each rank writes what it has, straight from the optimizer. A reader sees
no difference: the format names the boxes that a tensor was written in, and does not mind how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from miles.training.megatron.checkpoint.optimizer_state import Piece
from miles.training.megatron.versions import objects_to_write

ShardSlice: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


class DirectWriter(TorchDistSaveShardedStrategy):
    """For ``dist_checkpointing.save`` of a description by parameter's name and kind, with tensors on ``meta``.

    ``pieces`` gives what this rank has of each parameter. Each element is written by one rank: by the one that has it,
    or by the main replica where several have it.
    """

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__("torch_dist", 1)
        self._pieces = pieces

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Collective; returns when every file is flushed to the disk. Raises ``CheckpointException`` if the boxes of
        all ranks do not fill every tensor exactly once, before anything is written."""
        planner = _Planner()
        for name in objects_to_write():
            planner.add_object(sharded_state_dict.pop(name))
        for name, kinds in sharded_state_dict.items():
            for kind, described in kinds.items():
                for part in nested_values([described]):
                    planner.add(part, kind, self._pieces[name])
        dcp.save({}, storage_writer=_OneByOne(checkpoint_dir), planner=planner)


class _Planner(dcp.DefaultSavePlanner):
    """What this rank writes, and where its elements are now."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._items: list[WriteItem] = []
        self._elements: dict[MetadataIndex, torch.Tensor | None] = {}
        self._objects: dict[MetadataIndex, Any] = {}

    def add(self, part: ShardedTensor, kind: str, piece: Piece) -> None:
        """The boxes of ``part``, a view of the parameter's tensor, that ``piece`` fills."""
        replica = (*part.replica_id[:2], 0) if piece.is_cut else part.replica_id  # its last place is data-parallel
        if not is_main_replica(replica):
            return
        first = part.data.storage_offset()
        begin, end = max(piece.start - first, 0), min(piece.stop - first, part.data.numel())
        source = piece.tensors.get(kind)
        for offsets, sizes, number in shard_slices(part.local_shape, begin, end):
            axes = (0,) * part.prepend_axis_num
            place = torch.Size(a + b for a, b in zip(part.global_offset, (*axes, *offsets), strict=True))
            index = MetadataIndex(part.key, place)
            chunk = ChunkStorageMetadata(place, torch.Size((*(1 for _ in axes), *sizes)))
            data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), torch.Size(part.global_shape))
            self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            start = first + number - piece.start
            self._elements[index] = None if source is None else source[start : start + prod(sizes)]

    def add_object(self, described: ShardedObject) -> None:
        """Written by its main replica, as Megatron's own strategy writes it: in a list of one."""
        if is_main_replica(described.replica_id):
            index = MetadataIndex(described.unique_key)
            self._items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._objects[index] = [described.data]

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """An object, or a tensor: fp32 on CPU, with a storage of its own, as a view would be saved with all that it is
        a view of."""
        if write_item.type == WriteItemType.BYTE_IO:
            return self._objects[write_item.index]
        assert write_item.tensor_data is not None
        elements, sizes = self._elements[write_item.index], write_item.tensor_data.chunk.sizes
        if elements is None:  # a moment before the first step
            return torch.zeros(sizes)
        return elements.to("cpu", torch.float32, copy=True).view(sizes)


class _OneByOne(dcp.FileSystemWriter):
    """One file a rank. torch's own keeps every tensor in memory until its file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0.distcp"
        written = []
        with (Path(self.path) / name).open("wb") as file:
            for item in plan.items:
                start = file.tell()
                torch.save(planner.resolve_data(item), file)
                length = file.tell() - start
                written.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            file.flush()
            os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future


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
