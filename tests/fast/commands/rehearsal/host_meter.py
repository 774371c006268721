"""A meter of what a rank on this host allocates, so that a rehearsal can be compared with a measurement here.

A host does not round allocations, and its operations and collectives copy data that a GPU reads in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from miles.commands.rehearsal import trace
from miles.commands.rehearsal.meter import _KIND_OF_PHASE, MemoryKind, Message, Meter, Work

COPIED_BY_GLOO = ("allgather", "reduce_scatter")  # through a buffer as large as the whole (ProcessGroupGloo.cpp)


class HostMeter(Meter):
    """Records every operation of a rank on this host."""

    def _rounded(self, size: int) -> int:
        return size

    def _note_operation(
        self, func: Any, reads: list[torch.Tensor], outputs: list[torch.Tensor], work: Work | None
    ) -> None:
        is_elementwise = torch.Tag.pointwise in func.tags and not func.is_view
        if is_elementwise and any(tensor.is_floating_point() for tensor in (*reads, *outputs)):
            kind = _KIND_OF_PHASE.get(self.phase, MemoryKind.ACTIVATIONS)
            self._note_passing(converted_bytes(func, reads, outputs), kind)
        super()._note_operation(func, reads, outputs, work)

    def _note_sent(self, message: Message) -> None:
        super()._note_sent(message)
        if message.name in COPIED_BY_GLOO:
            self._note_passing(message.bytes, MemoryKind.COMMUNICATION)

    def _note_passing(self, size: int, kind: MemoryKind) -> None:
        """Record ``size`` bytes that are released before the next operation."""
        if size:
            self._numbers += 1
            self.record.kinds[self._numbers] = kind
            for change in (size, -size):
                self.record.add(self._numbers, change, self.phase)


def converted_bytes(func: Any, tensors: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Return the bytes of the copies that an elementwise operation makes on a CPU if its tensors differ in dtype.

    PyTorch's ``TensorIterator`` converts operands, and a result that is given, to a common dtype. On a GPU the kernel
    does that number by number.
    """
    operands = tensors[1:] if func._opname == "where" else tensors
    if len({tensor.dtype for tensor in operands}) < 2:
        return 0
    _, common = elementwise_dtypes(*operands, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)
    converted = [tensor for tensor in operands if tensor.dtype != common]
    if func._schema.is_mutable:  # the result is one of the operands
        converted += [tensor for tensor in outputs if tensor.dtype != common]
    return sum(tensor.numel() * common.itemsize for tensor in converted)


@contextmanager
def on_this_host() -> Iterator[None]:
    """Trace ranks as they run on this host, with its attention."""
    with patch.multiple(trace, Meter=HostMeter, fused_attention=nullcontext):
        yield
