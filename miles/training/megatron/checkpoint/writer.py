"""Writes Megatron's ``torch_dist`` format from the training processes themselves, one tensor at a time.

Megatron's own strategy is made for saving in the background: it starts a server process on every rank, which a killed
run leaves behind, and forks writers from a process that has threads. It also gathers what its ``sharded_state_dict``
describes: with a distributed optimizer every data-parallel rank (or the first) then holds whole fp32 weights and
moments beside its own state. Here each rank writes what it has, directly from the optimizer. A reader sees no
difference: the format lists the slices in which a tensor was written, and any number of slices is valid.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from miles.training.checkpoint_io import StagedFiles, StagingWriter
from miles.training.megatron.checkpoint.optimizer_state import Piece
from miles.training.megatron.versions import objects_to_write

ShardSlice: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, number of the first element


class DirectWriter(TorchDistSaveShardedStrategy):
    """The strategy for ``dist_checkpointing.save`` of descriptions by parameter name and kind, with ``meta`` tensors.

    ``pieces`` is this rank's part of each parameter. One rank writes each element: the one that holds it, or the main
    replica if several do.
    """

    def __init__(self, pieces: Mapping[str, Piece], staged: StagedFiles | None = None) -> None:
        super().__init__("torch_dist", 1)
        self._pieces = pieces
        self._staged = staged

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        """Write the checkpoint; return when every file is flushed to disk, or staged in memory. Collective.

        Raises ``CheckpointException`` before writing if the slices of all ranks do not fill every tensor exactly once.
        """
        planner = _Planner()
        for name in objects_to_write():
            planner.add_object(sharded_state_dict.pop(name))
        for name, kinds in sharded_state_dict.items():
            for kind, described in kinds.items():
                for part in nested_values([described]):
                    planner.add(part, kind, self._pieces[name])
        save_planned({}, storage_writer=_OneByOne(checkpoint_dir, self._staged), planner=planner)


class _Planner(DefaultSavePlanner):
    """The items that this rank writes, and their elements."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self._items: list[WriteItem] = []
        self._elements: dict[MetadataIndex, torch.Tensor | None] = {}
        self._objects: dict[MetadataIndex, Any] = {}

    def add(self, part: ShardedTensor, kind: str, piece: Piece) -> None:
        """Plan the slices of ``part``, a view of the parameter's tensor, that ``piece`` fills."""
        replica = (*part.replica_id[:2], 0) if piece.is_cut else part.replica_id  # the last number is data-parallel
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
        """Plan an object, written by its main replica in a list of one, as Megatron's own strategy does."""
        if is_main_replica(described.replica_id):
            index = MetadataIndex(described.unique_key)
            self._items.append(WriteItem(index, WriteItemType.BYTE_IO))
            self._objects[index] = [described.data]

    def create_local_plan(self) -> SavePlan:
        """Return the plan of this rank."""
        self.plan = SavePlan(self._items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the object or tensor of an item.

        Tensors are fp32 on CPU and own their storage: a view would be saved with all of its storage.
        """
        if write_item.type == WriteItemType.BYTE_IO:
            return self._objects[write_item.index]
        assert write_item.tensor_data is not None
        elements, sizes = self._elements[write_item.index], write_item.tensor_data.chunk.sizes
        if elements is None:  # a moment, before the first step
            return torch.zeros(sizes)
        return elements.to("cpu", torch.float32, copy=True).view(sizes)


class _OneByOne(StagingWriter):
    """Writes one file per rank. torch's own keeps every tensor in memory until its file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of ``plan`` one by one."""
        name = f"{plan.storage_data.prefix}0.distcp"
        written = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            file: Any = stream  # torch says no more than that it is a file
            for item in plan.items:
                start = file.tell()
                torch.save(planner.resolve_data(item), file)
                length = file.tell() - start
                written.append(WriteResult(item.index, length, _StorageInfo(name, start, length)))
            if self.sync_files:
                file.flush()
                os.fsync(file.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(written)
        return future


def shard_slices(shape: Sequence[int], begin: int, end: int) -> Iterator[ShardSlice]:
    """Yield the slices that elements ``begin`` to ``end`` of a tensor of ``shape`` fill, counted row by row.

    A matrix has at most three: the end of a row, whole rows, the beginning of a row.
    """
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
