"""The meter reports the same memory as torch's allocator on this host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function

from miles.commands.rehearsal.meter import Meter, Phase
from miles.commands.rehearsal.rehearsal import total
from tests.fast.commands.rehearsal.host_meter import HostMeter
from tests.fast.commands.rehearsal.measured import PASSES, peaks

ROWS = 500


def _operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an accumulator in fp32, a gradient in bf16, and a bf16 number for each row."""
    return torch.zeros(ROWS, 40), torch.zeros(ROWS, 40, dtype=torch.bfloat16), torch.zeros(ROWS, 1).bfloat16()


OPERATIONS: dict[str, Callable[..., object]] = {
    "fp32 += bf16": lambda main, grad, rows: main.add_(grad),
    "bf16 += fp32": lambda main, grad, rows: grad.add_(main),
    "fp32 += fp32": lambda main, grad, rows: main.add_(main),
    "fp32 * bf16": lambda main, grad, rows: main * grad,
    "fp32 * bf16, spread over columns": lambda main, grad, rows: main * rows,
    "fp32 * bool": lambda main, grad, rows: main * (main > 0),
    "fp32 < bf16": lambda main, grad, rows: main < grad,
    "where": lambda main, grad, rows: torch.where(grad > 0, main, grad),
    "bf16 * number": lambda main, grad, rows: grad * 2.0,
    "copy": lambda main, grad, rows: main.copy_(grad),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_host_copies_operands_of_another_dtype(operation):
    operands = _operands()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as allocations, record_function(PASSES):
        torch.empty(1)  # peaks count from the first allocation, so it is inside
        operation(*operands)
    # A number such as 2.0 becomes a tensor of a few bytes, without an operation.
    assert _foreseen(operation, HostMeter) == pytest.approx(peaks(allocations)[PASSES], abs=64)


def test_a_gpu_adds_a_gradient_in_bf16_to_one_in_fp32_without_a_copy():
    assert _foreseen(OPERATIONS["fp32 += bf16"], Meter) == 0


def _foreseen(operation: Callable[..., object], kind: type[Meter]) -> int:
    """Return the bytes that ``operation`` allocates at its peak."""
    fake = FakeTensorMode()
    meter = kind(fake, vocabulary=0)
    with fake, meter:
        operands = _operands()
        held = total(meter.record.held(meter.record.mark()))
        with meter.during(Phase.TRAIN):
            operation(*operands)
        return max(0, total(meter.record.peaks().get(Phase.TRAIN, {})) - held)
