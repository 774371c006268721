"""Run a few of a row of equal layers, and count the others as copies of these.

The first three and the last two layers of the row run. What was recorded between the starts of the third and the next
is copied for each layer that is left out, and so is what was recorded between the gradients that arrive there. With
Megatron all layers exist. With FSDP those that are left out are removed before weights are sharded, and the layer
before them holds parameters as large as theirs.

Layers have to be equal in structure, and the records of the third and of the next have to be equal: the same changes of
memory in the same order, and the same work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from miles.commands.rehearsal.record import Moment, Record, Stretch

FIRST = 3  # layers that run; FSDP gathers the weights of the first two backward passes earlier than those of others
LAST = 2
PLACES = frozenset({"layer_idx", "layer_number"})  # attributes that say where a layer is


class UnequalLayers(Exception):
    """Layers of equal structure do not do the same, so each of them must run."""


class _Mark(NamedTuple):
    """The start of a layer's forward pass, or the end of its backward pass."""

    place: int  # among the layers of the row that run
    is_backward: bool
    moment: Moment


class _Row:
    """The layers of a row that run, watched."""

    def __init__(self, layers: Sequence[nn.Module], left_out: int, record: Record) -> None:
        self._left_out, self._record = left_out, record
        self._last: _Mark | None = None
        self._neighbour: Stretch | None = None  # between the last two marks, if they are of one pass
        for place, layer in enumerate(layers):
            self._watch(layer, place)

    def _watch(self, layer: nn.Module, place: int) -> None:
        row, kind = self, type(layer)

        def called(self: nn.Module, *given: Any, **named: Any) -> Any:
            is_recomputed = torch._C._current_graph_task_id() != -1  # a backward pass is running
            if not is_recomputed:
                row._pass(place, is_backward=False)
                hidden = given[0] if given else named["hidden_states"]
                if hidden.requires_grad:
                    hidden.register_hook(lambda _: row._pass(place, is_backward=True))
            return kind.__call__(self, *given, **named)

        layer.__class__ = type(kind.__name__, (kind,), {"__call__": called})

    def _pass(self, place: int, is_backward: bool) -> None:
        """Compare and copy what was recorded since the mark before, which is the neighbour's if a pass continues."""
        last, before, record = self._last, self._neighbour, self._record
        expected = place + 1 if is_backward else place - 1
        follows = last is not None and (last.place, last.is_backward) == (expected, is_backward)
        self._neighbour = record.since(last.moment) if last is not None and follows else None
        if self._neighbour is not None:
            across, beside = (FIRST - 1, FIRST - 1) if is_backward else (FIRST, FIRST + 1)
            if place == beside and (before is None or not record.is_equal(before, self._neighbour)):
                raise UnequalLayers("neighbours in a row were recorded differently")
            if place == across:
                record.copy(self._neighbour, self._left_out)
        self._last = _Mark(place, is_backward, record.moment())


def leave_out_equal(record: Record, layers: Sequence[nn.Module]) -> list[int]:
    """Return the places between the ends of each row of equal layers, which ``record`` copies from the ends."""
    left_out: list[int] = []
    for row in rows(layers):
        middle = row[FIRST:-LAST]
        if middle:
            _Row([layers[place] for place in row if place not in middle], len(middle), record)
            left_out += middle
    return left_out


def rows(layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Yield the places of equal layers that are next to each other."""
    structures = [_structure(layer) for layer in layers]
    for _, row in groupby(range(len(layers)), key=lambda place: structures[place]):
        yield list(row)


def _structure(layer: nn.Module) -> list[Any]:
    """Return what a layer is made of, apart from its place: modules, their settings, parameters and buffers."""
    found: list[Any] = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None) and key not in PLACES
        }
        tensors = [
            (key, tensor.shape, tensor.dtype, tensor.requires_grad)
            for held in (module._parameters, module._buffers)
            for key, tensor in held.items()
            if tensor is not None
        ]
        found.append((name, type(module), settings, tensors))
    return found
