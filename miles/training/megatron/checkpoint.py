"""Checkpoints of Megatron's models and optimizers, which can be read under any layout of ranks."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as save_planned
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef

from miles.models.base import EMBEDDING
from miles.training import checkpoint_io
from miles.training.checkpoint_files import in_one_line, read_run_state, write_run_state
from miles.training.megatron.model.adapter import Adapter
from miles.training.megatron.moe import expert_biases
from miles.training.megatron.policy_model import PolicyModel
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.runner import MegatronTrainedModel
from miles.training.megatron.versions import objects_to_write
from miles.types.groups import gather_objects
from miles.types.weights import in_buckets

# Adam's state by model parameter, for all of Megatron's optimizers.
#
# Megatron keeps it in four forms: for fp32 models alongside the parameter, for bf16 models alongside an fp32 copy, with
# ``--use-distributed-optimizer`` in flat pieces on the data-parallel ranks, and with ``--optimizer-cpu-offload`` in
# such pieces in host memory. Here all of them look the same, so that a checkpoint written under one can be read under
# another.


MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """The part of a parameter's state on one rank: elements ``start`` to ``stop``, counted row by row."""

    start: int
    stop: int
    is_cut: bool  # whether the data-parallel ranks hold different elements, or equal ones
    tensors: dict[str, torch.Tensor]  # flat, by kind; without the moments before the first step


class AdamState:
    """The state of the optimizers behind ``adam``.

    ``parameter`` is a parameter of the model, or a buffer, which the optimizer does not have and every rank has whole.
    """

    def __init__(self, adam: Any) -> None:
        parts = adam.chained_optimizers if isinstance(adam, ChainedOptimizer) else [adam]
        sharded = [part for part in parts if isinstance(part, DistributedOptimizer)]
        self._sharded = {p: part for part in sharded for buffer in part.buffers for p in buffer.param_index_map}
        self._held = {p: held for part in sharded for p, held in _held(part)}
        self._owner = {main: part for part in parts for group in _groups(part) for main in group["params"]}

    def piece(self, parameter: torch.Tensor) -> Piece:
        """Return this rank's part of the state of ``parameter``. Nothing is copied or sent."""
        if not isinstance(parameter, torch.nn.Parameter):
            return Piece(0, parameter.numel(), False, {MASTER: parameter.view(-1)})
        main, place, adam = self._find(parameter)
        is_cut = parameter in self._sharded
        if main is None:
            return Piece(0, 0, is_cut, {})
        state = adam.state.get(main, {})
        held = {MASTER: main} | {name: state[name] for name in MOMENTS if name in state}
        start, stop, _ = place.indices(parameter.numel())
        return Piece(start, stop, is_cut, {kind: tensor.detach().view(-1) for kind, tensor in held.items()})

    @torch.no_grad()
    def restore(self, parameter: torch.Tensor, whole: dict[str, torch.Tensor], steps: int) -> None:
        """Restore the state of ``parameter``. Not collective.

        Args:
            parameter: The model's parameter or buffer, which is set too.
            whole: Tensors of the parameter's shape by kind. Without the moments, Adam starts again.
            steps: Steps taken when they were saved.
        """
        parameter.copy_(whole[MASTER])
        if not isinstance(parameter, torch.nn.Parameter):
            return
        main, place, adam = self._find(parameter)
        if main is None:
            return
        main.copy_(whole[MASTER].view(-1)[place].view(main.shape))
        state = adam.state
        state.pop(main, None)
        if MOMENTS[0] not in whole:
            return
        state[main] = {
            name: whole[name].view(-1)[place].view(main.shape).to(main.device, main.dtype, copy=True)
            for name in MOMENTS
        }
        state[main]["step"] = torch.tensor(float(steps), device=main.device)  # as the fused kernel expects

    def _find(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, slice, Any]:
        """Return Adam's tensor for it on this rank (or None), its slice of the parameter, and torch's optimizer."""
        part = self._sharded.get(parameter)
        if part is None:
            main = getattr(parameter, "main_param", parameter)
            return main, slice(None), self._owner[main].optimizer
        if parameter not in part.model_param_gbuf_map:
            return None, slice(0, 0), part.optimizer
        place = part._get_model_param_range_map(parameter)["param"]
        held, adam = self._held[parameter], part.optimizer
        if isinstance(adam, HybridDeviceOptimizer):
            held = adam.param_to_inner_param[held]  # fp32, and in host memory if it is offloaded
            parts = adam.sub_optimizers
            adam = next(part for part in parts for group in part.param_groups for p in group["params"] if p is held)
        return held, slice(place.start, place.end), adam


def _groups(part: Any) -> list[dict[str, Any]]:
    return [] if part.optimizer is None else part.optimizer.param_groups


def _held(part: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter that this rank has a part of, and the tensor of the optimizer with that part.

    Megatron's ``model_param_group_index_map`` has another order if the parameters of a group have two dtypes and so
    are in several gradient buffers: among the tensors the fp32 ones come first (optimizer/distrib_optimizer.py,
    ``_build_model_and_main_param_groups``).
    """
    for in_fp32, in_bf16, group in zip(part.model_fp32_groups, part.model_float16_groups, _groups(part), strict=True):
        yield from zip((*in_fp32, *in_bf16), group["params"], strict=True)


# Writes Megatron's ``torch_dist`` format from the training processes themselves, tensor by tensor.
#
# Megatron's own strategy is made for saving in the background: it starts a server process on every rank, which a killed
# run leaves behind, and forks writers from a process that has threads. It also gathers the tensors that its
# ``sharded_state_dict`` describes: with a distributed optimizer every data-parallel rank (or the first) then holds
# whole fp32 weights and moments alongside its own state. Here each rank writes its own state, directly from the
# optimizer. A reader sees no difference: the format lists the slices in which a tensor was written, and any number of
# slices is valid.


ShardSlice: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]  # offsets, sizes, number of the first element


class DirectWriter(TorchDistSaveShardedStrategy):
    """The strategy for ``dist_checkpointing.save`` of descriptions by parameter name and kind, with ``meta`` tensors.

    ``pieces`` is this rank's part of each parameter. One rank writes each element: the one that holds it, or the main
    replica if several do.
    """

    def __init__(self, pieces: Mapping[str, Piece], staged: checkpoint_io.StagedFiles | None = None) -> None:
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


class _OneByOne(checkpoint_io.StagingWriter):
    """Writes one file per rank. torch's own keeps every tensor in memory until its file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the items of ``plan`` one by one."""
        name = f"{plan.storage_data.prefix}0.distcp"
        written = []
        with self.fs.create_stream(Path(self.path) / name, "wb") as stream:
            file: Any = stream  # torch reports no more than that it is a file
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


# Checkpoints in Megatron's own format, ``torch_dist``: whole tensors by name, which can be read under any layout.
#
# Tensors have Megatron's names (``optimizer.state.exp_avg.…`` for Adam's), without rank numbers: each rank describes
# the parts that it holds. Weights are the fp32 ones that the optimizer updates. Saving copies one tensor at a
# time to the CPU, loading reads ``BUCKET_BYTES`` at once.


Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory
KINDS = (MASTER, *MOMENTS)
OF_OPTIMIZER = "optimizer.state."  # where names of the moments begin
BUCKET_BYTES = 512 * 1024**2  # of whole tensors on a rank; a larger tensor is read on its own


def check_can_save(policy: PolicyModel, ranks: Ranks) -> None:
    """Check, before training, that Megatron can describe every part of every tensor on exactly one rank. Collective.

    Raises ``ValueError`` for a model that ``save`` could not write under this layout.
    """
    empty = _empty(_sharded(policy, ranks), KINDS, "meta")
    storages = {_storage(described.data) for described in nested_values(empty)}
    try:
        parts, _ = save_preprocess(empty)
    except (CheckpointingException, AssertionError, KeyError) as error:  # describing the model may fail too
        raise _refusal(f"{type(error).__name__}: {error}") from None
    for part in nested_values(parts):
        # The writer locates the elements of a part by its position in the parameter's tensor.
        if not part.data.is_contiguous() or _storage(part.data) not in storages:
            raise _refusal(f"{part.key} is made of parts of rows, or of a copy")


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def save(
    folder: Path, model: MegatronTrainedModel[Any], state: dict[str, Any], staged: checkpoint_io.StagedFiles | None
) -> None:
    """Write everything that a resumed run needs into ``folder``, which is empty. Collective.

    Tensors go into ``staged`` if it is given. The caller makes the folder visible when it is complete. Raises
    ``OSError`` on all ranks if one cannot write its tensors.
    """
    adam = AdamState(model.optimizer.adam)
    sharded = _sharded(model.stage, model.ranks)
    pieces = {name: adam.piece(described.data) for name, described in sharded.items()}
    with checkpoint_io.save_errors(folder):
        writer = DirectWriter(pieces, staged)
        dist_checkpointing.save(_empty(sharded, KINDS, "meta"), str(folder), sharded_strategy=writer)
    checkpoint_io.write_random_state(folder, tensor_parallel.get_cuda_rng_tracker().get_states())
    if dist.get_rank() == 0:
        write_run_state(folder, "megatron", state, model.optimizer.state())
    dist.barrier()


def load(folder: Path, model: MegatronTrainedModel[Any], with_optimizer: bool, rng: bool) -> dict[str, Any]:
    """Read what ``save`` wrote, under any layout, and return the launcher's state. Collective."""
    state = read_run_state(folder, "megatron", "--load")
    steps = state["schedule"]["steps_done"] if with_optimizer else 0
    adam = AdamState(model.optimizer.adam)
    kinds = KINDS if with_optimizer else (MASTER,)
    for parameter, whole in _read(folder, model.stage, model.ranks, kinds, "--load"):
        adam.restore(parameter, whole, steps)
    model.optimizer.steps_done = steps
    if rng:
        states = checkpoint_io.restore_random_state(folder)
        if states:
            tensor_parallel.get_cuda_rng_tracker().set_states(states)
    launcher: dict[str, Any] = state["launcher"]
    return launcher


@torch.no_grad()
def load_weights(folder: Path, policy: PolicyModel, ranks: Ranks, flag: str) -> None:
    """Read the weights alone, into a model without an optimizer. Collective.

    Raises ``ValueError`` naming ``flag``, as ``load`` does.
    """
    for parameter, whole in read_weights(folder, policy, ranks, flag):
        parameter.copy_(whole)


def read_weights(
    folder: Path, policy: PolicyModel, ranks: Ranks, flag: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each weight of ``policy`` with what ``folder`` has for it, whole and fp32 on CPU. Collective."""
    read_run_state(folder, "megatron", flag)
    yield from ((parameter, whole[MASTER]) for parameter, whole in _read(folder, policy, ranks, (MASTER,), flag))


def save_weights(
    folder: Path,
    policy: PolicyModel,
    ranks: Ranks,
    value_of: Callable[[torch.Tensor], torch.Tensor],
    staged: checkpoint_io.StagedFiles | None = None,
) -> None:
    """Write weights alone: ``value_of`` each weight of ``policy``. Collective.

    They go into ``folder``, which is empty, or into ``staged`` if it is given.
    """
    sharded = _sharded(policy, ranks)
    pieces = {
        name: Piece(0, described.data.numel(), False, {MASTER: value_of(described.data).detach().view(-1)})
        for name, described in sharded.items()
    }
    with checkpoint_io.save_errors(folder):
        writer = DirectWriter(pieces, staged)
        dist_checkpointing.save(_empty(sharded, (MASTER,), "meta"), str(folder), sharded_strategy=writer)
    if dist.get_rank() == 0:
        write_run_state(folder, "megatron", {}, {"steps_done": 0})
    dist.barrier()


def _read(
    folder: Path, policy: PolicyModel, ranks: Ranks, kinds: tuple[str, ...], flag: str
) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield each parameter with its whole fp32 tensors, on CPU. Collective: all ranks read equally often."""
    sharded = _sharded(policy, ranks)
    buckets = list(in_buckets(sharded.items(), lambda part: 4 * len(kinds) * part.data.numel(), BUCKET_BYTES))
    try:
        # Checks all parts of every tensor, which a bucket may lack.
        parts, _ = save_preprocess(_empty(sharded, kinds, "meta"))
        turns, names = zip(*gather_objects((len(buckets), {part.key for part in nested_values(parts)})), strict=True)
        _check_holds_only(folder, policy, set().union(*names), flag)
        for turn in range(max(turns)):
            bucket = buckets[turn] if turn < len(buckets) else {}
            with checkpoint_io.loading(folder, flag):
                tensors = dist_checkpointing.load(
                    _empty(bucket, kinds, "cpu"), str(folder), validate_access_integrity=False
                )
            for name, described in bucket.items():
                yield described.data, tensors.pop(name)  # frees the bucket before the next one is read
    except CheckpointingException as error:
        raise ValueError(
            f"{flag}: the checkpoint {folder} does not hold this model ({in_one_line(error)}); give one that was saved "
            "with the same model and heads, and by no later megatron-core"
        ) from error


def _check_holds_only(folder: Path, policy: PolicyModel, names: Set[str], flag: str) -> None:
    """Refuse what Megatron would accept: weights that are not in ``names``, and a vocabulary of another size.

    Heads of multi-token prediction may be there, because a reference has none.

    Raises:
        ValueError: The checkpoint ``folder`` belongs to another model.
    """
    index = checkpoint_io.checked_index(folder, flag)
    sizes = {
        name: entry.size
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith((OF_OPTIMIZER, "mtp."))
    }
    reason = f"it also has {min(sizes.keys() - names)}" if sizes.keys() - names else None
    tokens, heads = policy.tokens_in_vocabulary, policy.config.num_attention_heads
    padded = {-(-tokens // tp) * tp for tp in range(1, heads + 1) if heads % tp == 0}
    if EMBEDDING in sizes and sizes[EMBEDDING][0] not in padded:
        reason = f"its vocabulary has {sizes[EMBEDDING][0]} rows, and the model's {tokens}"
    if reason is not None:
        raise ValueError(
            f"{flag}: the checkpoint {folder} does not hold this model ({reason}); give one that was saved with the "
            "same model"
        )


def _empty(sharded: dict[str, Sharded], kinds: tuple[str, ...], device: str) -> dict[str, Any]:
    """Return the description of each kind, with fp32 tensors to be filled (zeros on a real device)."""
    return {
        name: {
            kind: _holding(described, kind, torch.zeros(described.data.shape, dtype=torch.float32, device=device))
            for kind in (kinds if isinstance(described.data, torch.nn.Parameter) else (MASTER,))
        }
        for name, described in sharded.items()
    }


def _sharded(policy: PolicyModel, ranks: Ranks) -> dict[str, Sharded]:
    """Return Megatron's description of each parameter, and of the experts' biases; ``data`` is the tensor itself.

    With an adapter, only its parameters are described: the other weights come from ``--hf-checkpoint``.

    Shards are singletons: every layer and every expert has its own tensor, whatever the pipeline and expert sizes. The
    canary (objective/canary.py) is always 0 and is not saved.
    """
    if policy.adapter is not None:
        return dict(_sharded_adapter(policy.adapter, ranks))
    result: dict[str, Sharded] = {}
    for number, chunk in enumerate(policy.chunks):
        # A dictionary has the names of a chunk; a checkpoint has the keys of the whole model.
        result |= {f"{number}.{name}": sharded for name, sharded in _sharded_chunk(chunk, ranks).items()}
    return result


def _sharded_chunk(chunk: PolicyModel, ranks: Ranks) -> dict[str, Sharded]:
    described = chunk.sharded_state_dict(metadata={"dp_cp_group": ranks.token_group, "singleton_local_shards": True})
    named = dict(chunk.named_parameters()) | dict(expert_biases(chunk))
    tensors = {id(tensor): name for name, tensor in named.items() if tensor is not chunk.canary}
    result = {name: sharded for name, sharded in described.items() if id(sharded.data) in tensors}
    missing = tensors.keys() - {id(sharded.data) for sharded in result.values()}
    if missing:
        raise _refusal(", ".join(name for number, name in tensors.items() if number in missing))
    return result


def _sharded_adapter(adapter: Adapter, ranks: Ranks) -> Iterator[tuple[str, Sharded]]:
    for layer, name, part, parameter in adapter.parameters_by_name():
        key = f"adapter.{name}.{part}"
        groups = {"tp_group": ranks.tp, "dp_cp_group": ranks.token_group}
        if layer.divides(part):
            yield key, make_tp_sharded_tensor_for_checkpoint(parameter, key, layer.divided_dim, **groups)
        else:
            yield key, make_sharded_tensor_for_checkpoint(parameter, key, **groups)


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f"--save: megatron-core cannot write this model under this layout ({reason}); drop --save and export with "
        "--save-hf, or change the layout (first --pipeline-model-parallel-size)"
    )


def _holding(sharded: Sharded, kind: str, tensor: torch.Tensor) -> Sharded:
    """Return the description of the same part of the tensor of ``kind``, holding ``tensor``."""
    key = sharded.key if kind == MASTER else f"{OF_OPTIMIZER}{kind}.{sharded.key}"
    if isinstance(sharded, ShardedTensorFactory):
        return replace(sharded, key=key, data=tensor)
    return replace(sharded, key=key, data=tensor, dtype=tensor.dtype)
