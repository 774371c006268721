"""Operations that a rehearsal repeats have the results, and leave the record, that they have if they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rehearsed_layouts import LAYOUTS, save_models
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from miles.commands.rehearsal.meter import Known, KnownOperations, Meter, Record
from miles.commands.rehearsal.trace import RankTrace, trace_rank
from miles.config.validate import validate

CHOSEN = ("fsdp, 2 ranks, experts", "megatron, EP 2, TP 2", "megatron, 135M, PP 2", "megatron, CP 2", "fsdp, CP 2")
FAST = "megatron, 135M, PP 2"  # test_equal_layers.py traces FSDP
OPERATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "new": lambda x: x @ x.t(),
    "of another dtype": lambda x: x.bfloat16(),
    "view": lambda x: x[1:, ::2],
    "view of another dtype": lambda x: x.view(torch.int32),
    "in place": lambda x: x.t().mul_(2),
    "several new": lambda x: torch.topk(x, 2),
    "several views": lambda x: x.split([1, 3]),
    "nothing": lambda x: torch._foreach_add_([x, x.clone()], 1),
    "positions": lambda x: x[torch.tensor([0, 2, 2])],
    "created": lambda x: torch.zeros(2, 3).transpose(0, 1) + x.sum(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_repeated_operation_returns_what_it_returned(operation: Callable[[torch.Tensor], object]) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(fake, vocabulary=0)
    with fake, meter:
        x = torch.empty(4, 6)
        first, second = ([_described(t, x) for t in _tensors(operation(x))] for _ in range(2))
    assert first == second


def test_a_mask_and_a_tensor_given_twice_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    meter = Meter(fake, vocabulary=0)
    mask = torch.tensor([True, False, True, False])
    with fake, meter:
        x, y = torch.empty(4, 6), torch.empty(4, 6)
        assert [len(x[mask]), len(x[~mask | mask])] == [2, 4]
        before = meter.record.tally(meter.phase).bytes
        x + y
        twice = meter.record.tally(meter.phase).bytes
        x + x
        once = meter.record.tally(meter.phase).bytes
    assert twice - before == 3 * x.nbytes and once - twice == 2 * x.nbytes


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == FAST else [pytest.mark.slow]) for n in CHOSEN])
def test_a_trace_is_the_same_if_every_operation_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_models(tmp_path, weights=False)
    layout = replace(LAYOUTS[name], model="dense") if LAYOUTS[name].model == "135M" else LAYOUTS[name]
    settings = validate(layout.settings(tmp_path)).settings
    trace_rank(settings, 0)
    repeated = _watch_repeats(monkeypatch)
    known = _trace(settings, monkeypatch)
    assert repeated
    repeated.clear()
    monkeypatch.setattr(KnownOperations, "find", lambda *_: None)
    assert _trace(settings, monkeypatch) == known
    assert not repeated


def _trace(settings, monkeypatch: pytest.MonkeyPatch) -> tuple[RankTrace, list[object]]:
    """Return a trace, and the changes of memory in its order."""
    events: list[object] = []
    add = Record.add
    with monkeypatch.context() as patched:
        patched.setattr(Record, "add", lambda self, *event: (events.append(event), add(self, *event))[1])
        return trace_rank(settings, 0), events


def _watch_repeats(monkeypatch: pytest.MonkeyPatch) -> list[Known]:
    """Return a list of the operations that will have been repeated."""
    repeated: list[Known] = []
    repeat = KnownOperations.repeat

    def watched(self: KnownOperations, known: Known, inputs: list[torch.Tensor]):
        repeated.append(known)
        return repeat(self, known, inputs)

    monkeypatch.setattr(KnownOperations, "repeat", watched)
    return repeated


def _tensors(output: object) -> list[torch.Tensor]:
    if output is None:
        return []
    return [output] if isinstance(output, torch.Tensor) else list(output)  # type: ignore[call-overload]


def _described(tensor: torch.Tensor, base: torch.Tensor) -> tuple[object, ...]:
    """Return all that there is to a fake tensor, and whether it is a view of the given one."""
    assert isinstance(tensor, FakeTensor)
    storage = tensor.untyped_storage()
    return (
        (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, tensor.requires_grad)
        + (storage.nbytes(), storage._cdata == base.untyped_storage()._cdata)
        + (torch._C._dispatch_key_set(tensor), sorted(vars(tensor)))
    )
