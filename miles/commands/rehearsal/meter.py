"""Count what one rank allocates, computes and sends, operation by operation, while it runs under fake tensors.

Fake tensors have shapes and no values. Numbers that describe the layout (indices, counts, masks) are needed all the
same, so an operation whose tensors are all real runs for real, and integers are created real. Weights, activations and
everything computed from them are fake. If the trainer reads such a value (the gradient norm), a value is assumed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from miles.base.attributes import set_within
from miles.objective import token_log_probs
from miles.training import packed_attention
from miles.training.fsdp import plain_layers

# The record of a rank's operations, in order: allocations, work and collectives, and copies of a part of these.


class MemoryKind(StrEnum):
    """What memory holds."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"  # and whatever else the operations of a pass allocate
    LOGITS = "logits"
    COMMUNICATION = "communication"  # gathered weights, and the buffers of collectives
    KV_CACHE = "KV cache"
    ENGINE = "engine"  # its weights and workspace
    RUNTIME = "runtime"  # CUDA context, libraries, fragmentation


class Phase(StrEnum):
    """A part of an iteration, in order."""

    BUILD = "build"
    GENERATE = "generate"
    SCORE = "score"
    TRAIN = "forward and backward"
    REDUCE = "reduce gradients"
    OPTIMIZE = "optimizer"
    SYNC = "weight sync"


class Work(NamedTuple):
    """The size of one operation."""

    flops: int
    bytes: int  # read and written
    itemsize: int  # bytes of a number in its first floating-point operand


class Message(NamedTuple):
    """One collective, as one rank sees it."""

    name: str
    bytes: int  # of the largest tensor in it: the whole that is gathered, reduced or exchanged
    ranks: tuple[int, ...]


@dataclass
class OperationCounts:
    """How often each operation and each collective of a phase runs."""

    work: Counter[Work] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(work.flops * count for work, count in self.work.items())

    @property
    def bytes(self) -> int:
        """Bytes that operations read and write."""
        return sum(work.bytes * count for work, count in self.work.items())

    def add(self, other: OperationCounts) -> None:
        """Count the work of ``other`` too."""
        self.work.update(other.work)
        self.messages.update(other.messages)

    def beyond(self, earlier: OperationCounts) -> OperationCounts:
        """Return what was counted since the tally was ``earlier``."""
        return OperationCounts(self.work - earlier.work, self.messages - earlier.messages)

    def scaled(self, factor: float) -> OperationCounts:
        """Return the tally of ``factor`` times the work."""
        return OperationCounts(
            Counter({work: count * factor for work, count in self.work.items()}),
            Counter({message: count * factor for message, count in self.messages.items()}),
        )


Usage: TypeAlias = dict[MemoryKind, int]  # bytes by kind


class _Event(NamedTuple):
    storage: int
    change: int
    phase: Phase


class Moment(NamedTuple):
    """A position in the record, with what was counted before it."""

    position: int
    tallies: dict[Phase, OperationCounts]


class Stretch(NamedTuple):
    """The part of the record between two moments."""

    start: int
    end: int
    tallies: dict[Phase, OperationCounts]  # of this part alone


class _Copies(NamedTuple):
    """A part of the record that happens so many more times at its end, or what copies release there."""

    start: int
    end: int
    times: int
    released: Mapping[MemoryKind, int]


class Record:
    """The changes of memory and the work of one rank.

    Attributes:
        tallies: Operations and collectives by phase.
        kinds: What storages hold, by their numbers; activations if a number is not there.
    """

    def __init__(self) -> None:
        self.tallies: dict[Phase, OperationCounts] = {}
        self.kinds: dict[int, MemoryKind] = {}
        self._events: list[_Event] = []
        self._copies: list[_Copies] = []

    def add(self, storage: int, change: int, phase: Phase) -> None:
        """Note that the storage of this number has grown by ``change`` bytes."""
        self._events.append(_Event(storage, change, phase))

    def tally(self, phase: Phase) -> OperationCounts:
        """Return the tally of a phase, to count in it."""
        return self.tallies.setdefault(phase, OperationCounts())

    def forget(self) -> None:
        """Drop the work that was done so far; allocated memory stays."""
        self.tallies.clear()

    def mark(self) -> int:
        """Return the current position, for ``peaks`` and ``held``."""
        return len(self._events)

    def moment(self) -> Moment:
        """Return the current moment, for ``since``."""
        return Moment(len(self._events), {phase: tally.scaled(1) for phase, tally in self.tallies.items()})

    def since(self, moment: Moment) -> Stretch:
        """Return what was recorded since ``moment``."""
        counts = {p: tally.beyond(moment.tallies.get(p, OperationCounts())) for p, tally in self.tallies.items()}
        tallies = {phase: tally for phase, tally in counts.items() if tally.work or tally.messages}
        return Stretch(moment.position, len(self._events), tallies)

    def is_equal(self, one: Stretch, other: Stretch) -> bool:
        """Return whether memory changed alike in both stretches, and they have the same work."""
        changes = [
            [(event.change, event.phase) for event in self._events[stretch.start : stretch.end]]
            for stretch in (one, other)
        ]
        return one.tallies == other.tallies and changes[0] == changes[1]

    def copy(self, stretch: Stretch, times: int) -> None:
        """Let ``stretch``, which ends now, happen ``times`` more times."""
        assert stretch.end == len(self._events)
        self._copies.append(_Copies(stretch.start, stretch.end, times, {}))
        for phase, tally in stretch.tallies.items():
            self.tally(phase).add(tally.scaled(times))

    def release_copies(self) -> Usage:
        """Let copies release what their originals have released by now outside of a stretch, and return it."""
        net: Counter[int] = Counter()
        first: dict[int, int] = {}
        for position, event in enumerate(self._events):
            net[event.storage] += event.change
            first.setdefault(event.storage, position)
        released = self._held_by(self._copies)
        for start, end, times, _ in self._copies:
            for event in {event.storage: event for event in self._events[start:end]}.values():
                if start <= first[event.storage]:
                    released[self._kind(event)] -= times * net[event.storage]
        usage = {kind: size for kind, size in released.items() if size}
        self._copies.append(_Copies(len(self._events), len(self._events), 0, usage))
        return usage

    def peaks(self, since: int = 0) -> dict[Phase, Usage]:
        """Return what memory held when each phase was at its peak, counting from ``since`` on."""
        held: Counter[MemoryKind] = Counter()
        total = position = 0
        best: dict[Phase, int] = {}
        usages: dict[Phase, Usage] = {}

        def walk(start: int, end: int) -> None:
            nonlocal total
            for number, event in enumerate(self._events[start:end], start):
                held[self._kind(event)] += event.change
                total += event.change
                if number >= since and total > best.get(event.phase, -1):
                    best[event.phase] = total
                    usages[event.phase] = {kind: size for kind, size in held.items() if size}

        def add(change: Mapping[MemoryKind, int], times: int) -> None:
            nonlocal total
            for kind, size in change.items():
                held[kind] += times * size
                total += times * size

        for start, end, times, released in self._copies:
            walk(position, end)
            position = end
            add(released, -1)
            change = self._change(start, end)
            if sum(change.values()) > 0:  # the last copy holds most
                add(change, times - 1)
                walk(start, end)
            else:  # no copy holds more than the original
                add(change, times)
        walk(position, len(self._events))
        return usages

    def held(self, until: int) -> Usage:
        """Return what memory held at position ``until``."""
        usage = self._change(0, until)
        usage.update(self._held_by([copies for copies in self._copies if copies.end <= until]))
        return {kind: size for kind, size in usage.items() if size}

    def _held_by(self, copies: Sequence[_Copies]) -> Counter[MemoryKind]:
        """Return what ``copies`` have allocated and not released."""
        held: Counter[MemoryKind] = Counter()
        for start, end, times, released in copies:
            for kind, size in self._change(start, end).items():
                held[kind] += times * size
            held.subtract(released)
        return held

    def _change(self, start: int, end: int) -> Counter[MemoryKind]:
        change: Counter[MemoryKind] = Counter()
        for event in self._events[start:end]:
            change[self._kind(event)] += event.change
        return change

    def _kind(self, event: _Event) -> MemoryKind:
        return self.kinds.get(event.storage, MemoryKind.ACTIVATIONS)


# Repeat the results of operations without running them, if they were run before on tensors of the same shapes.
#
# Fake tensors have a cache of their own. To look something up there takes several times as long as here, because it is
# made for symbolic shapes and for devices of all kinds.


Key: TypeAlias = tuple[Any, ...]

_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_NOTED_APART = ("c10d", "_c10d_functional", "fsdp")


class _Output(NamedTuple):
    """A tensor that an operation returns: a tensor that it is given, a view of one, or a new one."""

    source: int | None  # index of that tensor
    is_view: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Known(NamedTuple):
    """The effects of an operation."""

    outputs: tuple[_Output, ...]
    container: type | None  # of the tensors that it returns; None for one tensor
    work: Work | None


class KnownOperations:
    """Operations by what decides their results. All traces of a process share them."""

    _known: dict[Key, Known | None] = {}
    _repeatable: dict[Any, bool] = {}

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor of this mode

    def key(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Key | None, list[torch.Tensor]]:
        """Return what decides the result of a call, or None if more than that does, and the tensors it is given."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        tensors: list[torch.Tensor] = []
        indices: dict[int, int] = {}
        is_decided = _describe(args, parts, tensors, indices)
        if kwargs:
            parts.append(tuple(kwargs))
            is_decided = _describe(kwargs.values(), parts, tensors, indices) and is_decided
        if not is_decided or not self._is_repeatable(func):
            return None, tensors
        return tuple(parts), tensors

    def _is_repeatable(self, func: Any) -> bool:
        """Return whether only dtypes and shapes of tensors decide what ``func`` does."""
        is_repeatable = self._repeatable.get(func)
        if is_repeatable is None:
            is_free = func is torch.ops.aten.index.Tensor or _VALUES_DECIDE.isdisjoint(func.tags)  # without masks
            is_repeatable = self._repeatable[func] = is_free and func.namespace not in _NOTED_APART
        return is_repeatable

    def find(self, key: Key) -> Known | None:
        """Return the effects of the operation, if they are known."""
        return self._known.get(key)

    def learn(
        self,
        key: Key,
        tensors: list[torch.Tensor],
        result: Any,
        outputs: list[torch.Tensor],
        work: Work | None,
    ) -> None:
        """Note the result of a call, unless it is not clear how to repeat it."""
        if key in self._known:
            return
        indices = {id(tensor): place for place, tensor in enumerate(tensors)}
        storages = {tensor.untyped_storage()._cdata: place for place, tensor in reversed([*enumerate(tensors)])}
        recipes = [_output(tensor, indices, storages) for tensor in outputs]
        is_simple = isinstance(result, torch.Tensor) or (
            type(result) in (tuple, list) and len(result) == len(outputs)  # nothing else is in it
        )
        pairs = zip(outputs, recipes, strict=True)
        new = [tensor.untyped_storage()._cdata for tensor, how in pairs if how and how.source is None]
        if not is_simple or None in recipes or len(set(new)) < len(new):
            self._known[key] = None
            return
        container = None if isinstance(result, torch.Tensor) else type(result)
        self._known[key] = Known(tuple(how for how in recipes if how), container, work)

    def repeat(self, known: Known, tensors: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Return the result of a known operation on other tensors, and the tensors in it."""
        outputs = [self._repeated(how, tensors) for how in known.outputs]
        return (outputs[0] if known.container is None else known.container(outputs)), outputs

    def _repeated(self, how: _Output, tensors: list[torch.Tensor]) -> torch.Tensor:
        if how.source is not None and not how.is_view:
            return tensors[how.source]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            like = torch.empty_strided(how.shape, how.stride, dtype=how.dtype, device="meta")
            if how.source is not None:
                like.set_(tensors[how.source].untyped_storage(), how.offset, how.shape, how.stride)
            return self._as_fake(like, how.device)

    def _as_fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Do the work of the constructor of fake tensors, in a third of its time."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = vars(FakeTensor(self._fake, tensor, device))
        result: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, tensor, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(result)
        vars(result).update(attributes)
        return result


def _describe(values: Iterable[Any], parts: list[Any], tensors: list[torch.Tensor], indices: dict[int, int]) -> bool:
    """Append what decides a result to ``parts``, and tensors to ``tensors``. Return whether nothing else decides.

    ``indices`` are the indices of tensors in ``tensors``: an operation reads a tensor once, however often it is given.
    """
    is_decided = True
    for value in values:
        if isinstance(value, torch.Tensor):
            is_fake = False
            if type(value) is FakeTensor:
                is_fake = True
                is_decided = is_decided and value.constant is None
            elif isinstance(value, FakeTensor) or value.dtype is torch.bool:  # a mask: its values decide
                is_decided = False
            place = indices.setdefault(id(value), len(tensors))
            tensors.append(value)
            parts += (place, is_fake, value.dtype, value.shape, value.stride(), value.storage_offset())
            parts.append(value.requires_grad)
        elif isinstance(value, list | tuple):
            parts += (type(value), len(value))
            is_decided = _describe(value, parts, tensors, indices) and is_decided
        else:
            parts += (type(value), value)  # 1 and 1.0 are equal, and give other results
    return is_decided


def _output(tensor: torch.Tensor, indices: dict[int, int], storages: dict[int, int]) -> _Output | None:
    """Return how to make such a tensor, or None if there is more to it."""
    place = indices.get(id(tensor))
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
        return None
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg() or (place is None and tensor.requires_grad):
        return None
    storage = tensor.untyped_storage()
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    how = (shape, stride, offset, tensor.dtype, tensor.fake_device)
    if place is not None:
        return _Output(place, False, *how)
    if storage._cdata in storages:
        return _Output(storages[storage._cdata], True, *how)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    if offset or storage.nbytes() != extent * tensor.itemsize:
        return None
    return _Output(None, False, *how)


aten = torch.ops.aten


# The kind of an allocation in a phase, if nothing else states it; activations in other phases.
_KIND_OF_PHASE = {Phase.BUILD: MemoryKind.WEIGHTS, Phase.OPTIMIZE: MemoryKind.OPTIMIZER}


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count a product whose rows are divided among matrices: every row is multiplied by one of them."""
    if a.ndim == 2 and b.ndim == 3:
        return 2 * a.shape[0] * a.shape[1] * b.shape[-1]
    if a.ndim == 3 and b.ndim == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.ndim == 3 else 1)


# Of operations that torch's registry does not know.
EXTRA_FLOPS: dict[Any, Callable[..., int]] = {aten._grouped_mm: _grouped_mm_flops}


NOT_SENDING = ("barrier", "wait_tensor", "recv")
CUDA_BLOCK = 512  # bytes to which PyTorch's allocator rounds


class Meter(TorchDispatchMode):
    """Records every operation of a rank on a GPU. Enter ``fake`` first, then the meter.

    Attributes:
        phase: The phase that the rank is in.
        record: The operations so far.
    """

    def __init__(self, fake: FakeTensorMode, vocabulary: int) -> None:
        """Start with an empty record.

        Args:
            fake: The mode that runs the operations.
            vocabulary: Tells logits from activations: their last dimension.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.phase = Phase.BUILD
        self.record = Record()
        self._operations = KnownOperations(fake)
        self.vocabulary = vocabulary
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
        original = torch.UntypedStorage.resize_
        infer = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        def infer_unseen(*args: Any, **named: Any) -> Any:
            with self.unseen():
                return infer(*args, **named)

        with (
            set_within(torch.UntypedStorage, resize_=resize),
            set_within(ShardingPropagator, _propagate_tensor_meta_non_cached=infer_unseen),
        ):
            yield

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Record nothing of what runs inside."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def label(self, tensors: Iterable[torch.Tensor], kind: MemoryKind) -> None:
        """Record the kind of contents of the storages of ``tensors``, from their allocation on."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if (entry := self._live.get(local.untyped_storage()._cdata)) is not None:
                self.record.kinds[entry[0]] = kind

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
        key, reads = self._operations.key(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(reads[0], FakeTensor):
            return _assumed(reads[0])
        is_real = not any(isinstance(t, FakeTensor) for t in reads) if reads else _creates_integers(func, args, kwargs)
        known = None if is_real or key is None else self._operations.find(key)
        if known is not None:
            result, outputs = self._operations.repeat(known, reads)
            for tensor in outputs:
                self._track(tensor)
            self._note_operation(func, reads, outputs, known.work)
            return result
        result = self._run(func, args, kwargs, is_real)
        outputs = [leaf for leaf in tree_iter(result) if isinstance(leaf, torch.Tensor)]
        for tensor in outputs:
            self._track(tensor)
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note_message(func, args, kwargs, [*reads, *outputs])
            return result
        if func.name() == "fsdp::chunk_cat":
            self.label(reads, MemoryKind.GRADIENTS)  # whole ones, on their way to the reduction
        work = _work_of(func, args, kwargs, reads, outputs, result)
        self._note_operation(func, reads, outputs, work)
        if key is not None and not is_real:
            self._operations.learn(key, reads, result, outputs, work)
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
            self.record.kinds[number] = MemoryKind.LOGITS
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        number, size = self._live.pop(key)
        self.record.add(number, -size, self.phase)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._live:
            return
        number, before = self._live[key]
        size = self._rounded(storage.nbytes())
        self._live[key] = number, size
        self.record.kinds.setdefault(number, MemoryKind.COMMUNICATION)
        self.record.add(number, size - before, self.phase)

    def _rounded(self, size: int) -> int:
        return -(-size // CUDA_BLOCK) * CUDA_BLOCK

    def _note_message(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> None:
        ranks = _ranks_of(args, kwargs)
        name = func._opname.strip("_").removesuffix("_base").removesuffix("_coalesced")
        name = {"allgather_into_tensor": "allgather", "reduce_scatter_tensor": "reduce_scatter"}.get(name, name)
        if ranks is None or len(ranks) < 2 or not tensors or name in NOT_SENDING:
            return
        for tensor in tensors:
            entry = self._live.get(tensor.untyped_storage()._cdata)
            if entry is not None and name not in ("broadcast", "allreduce", "send"):
                self.record.kinds.setdefault(entry[0], MemoryKind.COMMUNICATION)
        size = max(sum(leaf.nbytes for leaf in tree_iter(each) if isinstance(leaf, torch.Tensor)) for each in args)
        self._note_sent(Message(name, size, ranks))

    def _note_sent(self, message: Message) -> None:
        self.record.tally(self.phase).messages[message] += 1

    def _note_operation(
        self, func: Any, reads: list[torch.Tensor], outputs: list[torch.Tensor], work: Work | None
    ) -> None:
        if work is not None:
            self.record.tally(self.phase).work[work] += 1


def _work_of(
    func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor], outputs: list[torch.Tensor], result: Any
) -> Work | None:
    """Return the work of an operation, if it has any."""
    if func.is_view or not (tensors or outputs):
        return None
    floating = [tensor for tensor in (*tensors, *outputs) if tensor.is_floating_point()]
    if not floating:
        return None
    packet = func._overloadpacket
    flops = 0
    if packet in EXTRA_FLOPS:
        flops = EXTRA_FLOPS[packet](*args, **kwargs)
    elif packet in flop_registry:
        flops = flop_registry[packet](*args, **kwargs, out_val=result)
    if func._opname in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):
        return None
    read, written = {id(tensor): tensor.nbytes for tensor in tensors}, sum(tensor.nbytes for tensor in outputs)
    itemsize = floating[0].element_size()  # of the first operand; some kernels return statistics in fp32
    return Work(flops, sum(read.values()) + written, itemsize)


def _assumed(value: torch.Tensor) -> Any:
    """Return the assumed result for a value computed from weights: a norm that is clipped, a check that passes."""
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
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions


def _grouped_in_fp32(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any) -> Any:
    """Return the result of a grouped product, whose fake implementation takes bf16 only."""
    if a.ndim == b.ndim == 2:
        assert offs is not None
        return a.new_empty(offs.shape[0], a.shape[0], b.shape[1])
    if a.ndim == 2 or b.ndim == 3:
        return a.new_empty(*a.shape[:-1], b.shape[-1])
    return a.new_empty(a.shape[1], b.shape[1])


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


# Attention as the fused kernel of a GPU computes it: memory linear in the length of a sequence.
#
# The trace runs on the host, where PyTorch would choose another kernel. The layout of the rows, masks and heads stays
# production code (training/packed_attention.py); only the innermost call is replaced.


@torch.library.custom_op("miles_rehearsal::attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("only fake tensors come here")


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the log-sum-exp of every query that the backward pass reads."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("miles_rehearsal::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise AssertionError("only fake tensors come here")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three gradients, and the fp32 sum that the kernel writes the first to."""
    return (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(q.shape, dtype=torch.float32))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, pairs: int
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = _attention(q, k, v, pairs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pairs, ctx.mask = pairs, mask  # the backward pass of PyTorch's kernel reads the mask, so it is held
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (*_attention_backward(grad, *ctx.saved_tensors, ctx.pairs)[:3], None, None)


def _forward_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> int:
    return 2 * pairs * q.shape[1] * (q.shape[-1] + v.shape[-1])


def _backward_flops(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    """Count five products: the scores again, and the gradients of scores, queries, keys and values."""
    pairs = int(rest[-1])
    return 2 * pairs * q.shape[1] * (3 * q.shape[-1] + 2 * v.shape[-1])


EXTRA_FLOPS[torch.ops.miles_rehearsal.attention] = _forward_flops
EXTRA_FLOPS[torch.ops.miles_rehearsal.attention_backward] = _backward_flops


@contextmanager
def fused_attention() -> Iterator[None]:
    """Trace attention as a GPU's kernel. It counts the pairs that a causal query sees, not the whole square.

    What only a CPU does is left out: logits in parts of a chunk, rows without the queries that another row has,
    attention over short rows by products, norms and rotary positions with few operations.
    """
    with (
        set_within(
            packed_attention,
            _fused_attention=_attend,
            _without_repeated_queries=lambda spans, packed: iter(spans),
            SHORT=0,
        ),
        set_within(plain_layers, _is_ours=lambda hidden_states, config: False),
        set_within(token_log_probs, CACHED_BYTES=0),
    ):
        yield


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, dropout: float, visible: torch.Tensor | None
) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if visible is None:
        pairs = q.shape[0] * (queries * keys - queries * (queries - 1) // 2)
    else:
        mask = q.new_zeros(visible.shape)  # PyTorch makes numbers of the scores' dtype of a mask of booleans
        if isinstance(visible, FakeTensor):  # chosen keys: values decide which, and a kernel skips none of the others
            pairs = q.shape[0] * queries * keys
        else:
            with unset_fake_temporarily():
                pairs = int(visible.sum()) * (q.shape[0] // visible.shape[0])
    out: torch.Tensor = _Attention.apply(q, k, v, mask, pairs)  # type: ignore[no-untyped-call]
    return out
