"""Count what one rank allocates, computes and sends, operation by operation, while it runs under fake tensors.

Fake tensors have shapes and no values. Numbers that describe the layout (indices, counts, masks) are needed all the
same, so an operation whose tensors are all real runs for real, and integers are created real. Weights, activations and
everything computed from them are fake. If the trainer reads such a value (the gradient norm), a value is assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from miles.commands.rehearsal.known_operations import KnownOperations
from miles.commands.rehearsal.record import Kind, Message, Phase, Record, Work

aten = torch.ops.aten


# What is allocated in a phase, if nothing else says what it is; activations in other phases.
_KIND_OF_PHASE = {Phase.BUILD: Kind.WEIGHTS, Phase.OPTIMIZE: Kind.OPTIMIZER}


FlopFormula: TypeAlias = Callable[..., int]
EXTRA_FLOPS: dict[Any, FlopFormula] = {}  # of operations that torch's registry does not know


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count a product whose rows are divided among matrices: every row is multiplied by one of them."""
    if a.ndim == 2 and b.ndim == 3:
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    if a.ndim == 3 and b.ndim == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.ndim == 3 else 1)


if hasattr(aten, "_grouped_mm"):
    EXTRA_FLOPS[aten._grouped_mm] = _grouped_mm_flops


NOT_SENDING = ("barrier", "wait_tensor", "recv")
COPIED_BY_GLOO = ("allgather", "reduce_scatter")  # through a buffer as large as the whole (ProcessGroupGloo.cpp)
CUDA_BLOCK = 512  # bytes to which PyTorch's allocator rounds


class Meter(TorchDispatchMode):
    """Records every operation of a rank. Enter ``fake`` first, then the meter.

    Attributes:
        phase: The phase that the rank is in.
        record: The operations so far.
    """

    def __init__(self, fake: FakeTensorMode, vocabulary: int, on_gpu: bool = True) -> None:
        """Start with an empty record.

        Args:
            fake: The mode that runs the operations.
            vocabulary: Tells logits from activations: their last dimension.
            on_gpu: Whether allocations are those of a GPU, whose allocator rounds sizes up, or of this host, where
                operations and collectives copy what a GPU reads in place.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.on_gpu = on_gpu
        self.phase = Phase.BUILD
        self.record = Record()
        self._operations = KnownOperations(fake)
        self.vocabulary = vocabulary
        self._block = CUDA_BLOCK if on_gpu else 1
        self._live: dict[int, tuple[int, int]] = {}  # a storage's address: its number, and its bytes
        self._numbers = 0
        self._is_paused = False

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Count what runs inside under ``phase``."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notice what no operation shows, and overlook operations that no rank runs.

        FSDP resizes the storages of gathered weights in place. DTensor infers the shape of a result from whole tensors,
        under the same fake mode.
        """
        original, infer = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached
        meter = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            found = original(storage, size)
            meter._resized(storage)
            return found

        def infer_unseen(*given: Any, **named: Any) -> Any:
            with meter.unseen():
                return infer(*given, **named)

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign,assignment]
        ShardingPropagator._propagate_tensor_meta_non_cached = infer_unseen  # type: ignore[method-assign]
        try:
            yield
        finally:
            ShardingPropagator._propagate_tensor_meta_non_cached = infer  # type: ignore[method-assign]
            torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Record nothing of what runs inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def label(self, tensors: Iterable[torch.Tensor], kind: Kind) -> None:
        """Say what the storages of ``tensors`` hold, from their allocation on."""
        for tensor in tensors:
            for local in _locals(tensor):
                number, _size = self._live.get(local.untyped_storage()._cdata, (None, 0))
                if number is not None:
                    self.record.kinds[number] = kind

    def held_by_copies(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count no memory of those ``tensors`` that were made unseen: copies of a stretch hold it."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._numbers += 1
                self._live[storage._cdata] = self._numbers, 0
                weakref.finalize(storage, self._freed, storage._cdata)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and to skip the compiler takes as long as the rest of this class

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` and record it."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # most of what comes here
            return args[0].fake_device
        if DTensor in types:
            return NotImplemented  # it becomes operations on local tensors, which come here
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        key, given = self._operations.key(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(given[0], FakeTensor):
            return _assumed(given[0])
        is_real = not any(isinstance(t, FakeTensor) for t in given) if given else _creates_integers(func, args, kwargs)
        known = None if is_real or key is None else self._operations.find(key)
        if known is not None:
            result, made = self._operations.repeat(known, given)
            for tensor in made:
                self._track(tensor)
            self._note_work(known.work, known.converted)
            return result
        result = self._run(func, args, kwargs, is_real)
        made = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        for tensor in made:
            self._track(tensor)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_message(func, args, kwargs, [*given, *made])
            return result
        if func.name() == "fsdp::chunk_cat":
            self.label(given, Kind.GRADIENTS)  # whole ones, on their way to the reduction
        work, converted = _work_of(func, args, kwargs, given, made, result)
        self._note_work(work, converted)
        if key is not None and not is_real:
            self._operations.learn(key, given, result, made, work, converted)
        return result

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_real: bool) -> Any:
        if is_real:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten.masked_select.default and not isinstance(args[1], FakeTensor):
            with unset_fake_temporarily():
                chosen = int(args[1].expand(args[0].shape).sum())
            return args[0].new_empty(chosen)
        if func is aten._grouped_mm.default and args[0].dtype is torch.float32:
            return _grouped_in_fp32(*args, **kwargs)
        if func.namespace == "c10d" and "coalesced" in func._opname:
            return _fake_coalesced(func, args, kwargs)
        if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
            args = (args[0], _without_masks(args[1]), *args[2:])
        return func(*args, **kwargs)

    def _track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        self._numbers += 1
        number, size = self._numbers, self._rounded(storage.nbytes())
        self._live[key] = number, size
        self.record.add(number, size, self.phase)
        if self.phase in _KIND_OF_PHASE:
            self.record.kinds[number] = _KIND_OF_PHASE[self.phase]
        elif tensor.ndim == 2 and tensor.shape[-1] == self.vocabulary and tensor.is_floating_point():
            self.record.kinds[number] = Kind.LOGITS
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        number, size = self._live.pop(key)
        self.record.add(number, -size, self.phase)

    def _note_passing(self, size: int, kind: Kind) -> None:
        """Record ``size`` bytes that are released before the next operation."""
        self._numbers += 1
        self.record.kinds[self._numbers] = kind
        for change in (size, -size):
            self.record.add(self._numbers, change, self.phase)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            return
        number, before = self._live[key]
        size = self._rounded(storage.nbytes())
        self._live[key] = number, size
        self.record.kinds.setdefault(number, Kind.COMMUNICATION)
        self.record.add(number, size - before, self.phase)

    def _rounded(self, size: int) -> int:
        return -(-size // self._block) * self._block

    def _note_message(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        ranks = _ranks_of(args, kwargs)
        name = func._opname.strip("_").removesuffix("_base").removesuffix("_coalesced")
        name = {"allgather_into_tensor": "allgather", "reduce_scatter_tensor": "reduce_scatter"}.get(name, name)
        if ranks is None or len(ranks) < 2 or not tensors or name in NOT_SENDING:
            return
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None and name not in ("broadcast", "allreduce", "send"):
                self.record.kinds.setdefault(entry[0], Kind.COMMUNICATION)
        size = max(sum(_size(leaf) for leaf in tree_iter(argument)) for argument in args)
        self.record.tally(self.phase).messages[Message(name, size, ranks)] += 1
        if not self.on_gpu and name in COPIED_BY_GLOO:
            self._note_passing(size, Kind.COMMUNICATION)

    def _note_work(self, work: Work | None, converted: int) -> None:
        """Count an operation, and on a host the bytes that it copies to another dtype and releases."""
        if converted and not self.on_gpu:
            self._note_passing(converted, _KIND_OF_PHASE.get(self.phase, Kind.ACTIVATIONS))
        if work is not None:
            self.record.tally(self.phase).work[work] += 1


def _work_of(
    func: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor], result: Any
) -> tuple[Work | None, int]:
    """Return the work of an operation, if it has any, and the bytes that it copies on a host to another dtype."""
    if func.is_view or not (given or made):
        return None, 0
    floating = [tensor for tensor in (*given, *made) if tensor.is_floating_point()]
    if not floating:
        return None, 0
    converted = _converted_bytes(func, given, made) if torch.Tag.pointwise in func.tags else 0
    packet = func._overloadpacket
    flops = 0
    if packet in EXTRA_FLOPS:
        flops = EXTRA_FLOPS[packet](*args, **kwargs)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    if func._opname in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):
        return None, converted
    read = {id(tensor): tensor.numel() * tensor.element_size() for tensor in given}
    written = sum(tensor.numel() * tensor.element_size() for tensor in made)
    itemsize = floating[0].element_size()  # of the first operand; some kernels return statistics in fp32
    return Work(flops, sum(read.values()) + written, itemsize), converted


def _locals(tensor: Any) -> list[torch.Tensor]:
    if tensor is None:
        return []
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor]


def _assumed(value: torch.Tensor) -> Any:
    """Return what a value computed from weights is assumed to be: a norm that is clipped, a check that passes."""
    if value.dtype is torch.bool:
        return True
    if value.is_floating_point():
        return 2.0
    raise ValueError(
        "--rehearse: this model reads a whole number that depends on its activations, such as the tokens of an expert, "
        "and a rehearsal has no activations; choose another --train-backend or another model"
    )


def _creates_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    if func._opname in ("arange", "full"):
        return all(isinstance(number, int) for number in tree_iter(args))
    return False


def _without_masks(indices: Any) -> Any:
    """Replace masks, whose number of set entries is known, by the positions of these."""
    found: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                found += index.nonzero(as_tuple=True)
        else:
            found.append(index)
    return found


def _grouped_in_fp32(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
    """Return the result of a grouped product, whose fake implementation takes bf16 only."""
    if a.ndim == b.ndim == 2:
        assert offs is not None
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    return (
        a.new_empty(*a.shape[:-1], b.shape[-1]) if a.ndim == 2 or b.ndim == 3 else a.new_empty(a.shape[1], b.shape[1])
    )


def _converted_bytes(func: Any, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Return the bytes of the copies that an elementwise operation makes on a CPU if its tensors differ in dtype.

    PyTorch's ``TensorIterator`` converts operands, and a result that is given, to a common dtype. On a GPU the kernel
    does that number by number.
    """
    operands = given[1:] if func._opname == "where" else given
    if len({tensor.dtype for tensor in operands}) < 2:
        return 0
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    converted = [tensor for tensor in operands if tensor.dtype != common]
    if func._schema.is_mutable:  # the result is one of the operands
        converted += [tensor for tensor in made if tensor.dtype != common]
    return sum(tensor.numel() * common.itemsize for tensor in converted)


def _size(leaf: Any) -> int:
    return leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0


def _fake_coalesced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run collectives in one call, for which torch has no fake implementation, on a number per rank."""
    ranks = len(_ranks_of(args, kwargs) or (0,))
    wholes = {"reduce_scatter_tensor_coalesced_": 1, "allgather_into_tensor_coalesced_": 0}.get(func._opname)
    with unset_fake_temporarily():
        tiny = [
            [torch.zeros(ranks if position == wholes else 1)] if isinstance(argument, list) else argument
            for position, argument in enumerate(args)
        ]
        return func(*tiny, **kwargs)


def _ranks_of(args: Any, kwargs: Any) -> tuple[int, ...] | None:
    """Return the ranks of a collective's process group: an argument of its operation, or the name of one."""
    for leaf in tree_iter((args, kwargs)):
        group: Any = None
        if isinstance(leaf, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(leaf)
            except RuntimeError:
                continue  # a reduction, not a group
        elif isinstance(leaf, str):
            try:
                group = dist.distributed_c10d._resolve_process_group(GroupName(leaf))
            except (RuntimeError, ValueError, LookupError):
                continue
        if group is not None:
            return tuple(dist.get_process_group_ranks(group))
    return None
