"""The seconds of counted work."""

from __future__ import annotations

from collections import Counter

import pytest

from miles.commands.rehearsal.meter import OperationCounts, Phase, Work
from miles.commands.rehearsal.roofline import KNOWN, USUAL_MEMORY, USUAL_PRODUCT, seconds

H100 = KNOWN["h100"]
PRODUCT = Work(flops=989 * 10**9, bytes=0, itemsize=2)  # 1 ms
ELEMENTWISE = Work(flops=0, bytes=335 * 10**7, itemsize=2)  # 1 ms


@pytest.mark.parametrize(
    ("phase", "milliseconds"), [(Phase.SCORE, 2), (Phase.TRAIN, 2), (Phase.REDUCE, 5), (Phase.OPTIMIZE, 5)]
)
def test_elementwise_work_is_fused_at_best_into_the_products_of_the_passes(phase, milliseconds):
    bounds = seconds(OperationCounts(work=Counter({PRODUCT: 2, ELEMENTWISE: 3})), H100, phase)
    assert bounds.low == pytest.approx(milliseconds / 1000)
    assert bounds.high == pytest.approx((2 / USUAL_PRODUCT + 3 / USUAL_MEMORY) / 1000)
