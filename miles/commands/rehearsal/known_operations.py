"""Repeat the results of operations without running them, if they were run before on tensors of the same shapes.

Fake tensors have a cache of their own. To look something up there takes several times as long as here, because it is
made for symbolic shapes and for devices of all kinds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from miles.commands.rehearsal.record import Work

Key: TypeAlias = tuple[Any, ...]

_VALUES_DECIDE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_NOTED_APART = ("c10d", "_c10d_functional", "fsdp")


class _Made(NamedTuple):
    """A tensor that an operation returns: a tensor that it is given, a view of one, or a new one."""

    given: int | None  # place of that tensor
    is_view: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class Known(NamedTuple):
    """What an operation does."""

    made: tuple[_Made, ...]
    container: type | None  # of the tensors that it returns; None for one tensor
    work: Work | None
    converted: int  # bytes that a host copies for it


class KnownOperations:
    """Operations by what decides their results. Those of all traces of a process are in one place."""

    _known: dict[Key, Known | None] = {}
    _repeatable: dict[Any, bool] = {}

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of a fake tensor of this mode

    def key(self, func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> tuple[Key | None, list[torch.Tensor]]:
        """Return what decides the result of a call, or None if more than that does, and the tensors it is given."""
        parts: list[Any] = [func, torch.get_default_dtype()]
        given: list[torch.Tensor] = []
        places: dict[int, int] = {}
        is_decided = _describe(args, parts, given, places)
        if kwargs:
            parts.append(tuple(kwargs))
            is_decided = _describe(kwargs.values(), parts, given, places) and is_decided
        if not is_decided or not self._is_repeatable(func):
            return None, given
        return tuple(parts), given

    def _is_repeatable(self, func: Any) -> bool:
        """Return whether nothing but dtypes and shapes of tensors decides what ``func`` does."""
        found = self._repeatable.get(func)
        if found is None:
            is_free = func is torch.ops.aten.index.Tensor or _VALUES_DECIDE.isdisjoint(func.tags)  # without masks
            found = self._repeatable[func] = is_free and func.namespace not in _NOTED_APART
        return found

    def find(self, key: Key) -> Known | None:
        """Return what the operation does, if that is known."""
        return self._known.get(key)

    def learn(
        self,
        key: Key,
        given: list[torch.Tensor],
        result: Any,
        made: list[torch.Tensor],
        work: Work | None,
        converted: int,
    ) -> None:
        """Note the result of a call, unless it is not clear how to repeat it."""
        if key in self._known:
            return
        places = {id(tensor): place for place, tensor in enumerate(given)}
        storages = {tensor.untyped_storage()._cdata: place for place, tensor in reversed([*enumerate(given)])}
        found = [_made(tensor, places, storages) for tensor in made]
        is_simple = isinstance(result, torch.Tensor) or (
            type(result) in (tuple, list) and len(result) == len(made)  # nothing else is in it
        )
        new = [t.untyped_storage()._cdata for t, how in zip(made, found, strict=True) if how and how.given is None]
        if not is_simple or None in found or len(set(new)) < len(new):
            self._known[key] = None
            return
        container = None if isinstance(result, torch.Tensor) else type(result)
        self._known[key] = Known(tuple(how for how in found if how), container, work, converted)

    def repeat(self, known: Known, given: list[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        """Return the result of a known operation on other tensors, and the tensors in it."""
        made = [self._repeated(how, given) for how in known.made]
        return (made[0] if known.container is None else known.container(made)), made

    def _repeated(self, how: _Made, given: list[torch.Tensor]) -> torch.Tensor:
        if how.given is not None and not how.is_view:
            return given[how.given]
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            like = torch.empty_strided(how.shape, how.stride, dtype=how.dtype, device="meta")
            if how.given is not None:
                like.set_(given[how.given].untyped_storage(), how.offset, how.shape, how.stride)
            return self._as_fake(like, how.device)

    def _as_fake(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Do what the constructor of fake tensors does, in a third of its time."""
        attributes = self._attributes.get(device)
        if attributes is None:
            attributes = self._attributes[device] = vars(FakeTensor(self._fake, tensor, device))
        made: FakeTensor = torch.Tensor._make_subclass(
            FakeTensor, tensor, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(attributes)
        return made


def _describe(values: Iterable[Any], parts: list[Any], given: list[torch.Tensor], places: dict[int, int]) -> bool:
    """Append what decides a result to ``parts``, and tensors to ``given``. Return whether nothing else decides.

    ``places`` are those of tensors in ``given``: an operation reads a tensor once, however often it is given.
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
            place = places.setdefault(id(value), len(given))
            given.append(value)
            parts += (place, is_fake, value.dtype, value.shape, value.stride(), value.storage_offset())
            parts.append(value.requires_grad)
        elif isinstance(value, list | tuple):
            parts += (type(value), len(value))
            is_decided = _describe(value, parts, given, places) and is_decided
        else:
            parts += (type(value), value)  # 1 and 1.0 are equal, and give other results
    return is_decided


def _made(tensor: torch.Tensor, places: dict[int, int], storages: dict[int, int]) -> _Made | None:
    """Return how to make such a tensor, or None if there is more to it."""
    place = places.get(id(tensor))
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided:
        return None
    if tensor.constant is not None or tensor.is_conj() or tensor.is_neg() or (place is None and tensor.requires_grad):
        return None
    storage = tensor.untyped_storage()
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    how = (shape, stride, offset, tensor.dtype, tensor.fake_device)
    if place is not None:
        return _Made(place, False, *how)
    if storage._cdata in storages:
        return _Made(storages[storage._cdata], True, *how)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    if offset or storage.nbytes() != extent * tensor.itemsize:
        return None
    return _Made(None, False, *how)
