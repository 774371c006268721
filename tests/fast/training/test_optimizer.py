"""Properties of the learning-rate schedule for arbitrary settings."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.config.optimizer import OptimizerArguments
from miles.training.optimizer import DECAYS, learning_rate

TOTAL = 20
SCHEDULES = st.builds(
    OptimizerArguments,
    lr=st.floats(1e-4, 1.0),
    min_lr=st.floats(0.0, 1e-4),
    lr_decay_style=st.sampled_from(["constant", "linear", "cosine"]),
    lr_decay_iters=st.none() | st.integers(1, 40),
    lr_warmup_iters=st.integers(0, 10),
)


@given(SCHEDULES)
def test_rises_to_lr_then_never_rises(schedule):
    rates = [learning_rate(step, schedule, TOTAL) for step in range(60)]
    warmup = schedule.lr_warmup_iters
    assert all(0 < rate <= schedule.lr * (1 + DOUBLE_ERROR) for rate in rates[:warmup])
    assert all(a < b for a, b in zip(rates[:warmup], rates[1:warmup], strict=False))
    after = rates[warmup:]
    assert all(b <= a * (1 + DOUBLE_ERROR) for a, b in zip(after, after[1:], strict=False))
    assert after[0] == pytest.approx(schedule.lr) or warmup >= (schedule.lr_decay_iters or TOTAL)


@given(SCHEDULES)
def test_ends_at_min_lr_and_stays(schedule):
    end = max(schedule.lr_decay_iters or TOTAL, schedule.lr_warmup_iters + 1)
    wanted = schedule.lr if schedule.lr_decay_style == "constant" else schedule.min_lr
    assert [learning_rate(step, schedule, TOTAL) for step in (end, end + 1, end + 99)] == pytest.approx([wanted] * 3)


@given(st.integers(1, 100), st.floats(0.0, 0.9))
def test_warmup_fraction_is_a_share_of_the_decay(total, share):
    by_share = OptimizerArguments(lr=1.0, lr_warmup_fraction=share)
    by_steps = OptimizerArguments(lr=1.0, lr_warmup_iters=round(share * total))
    assert all(learning_rate(s, by_share, total) == learning_rate(s, by_steps, total) for s in range(total))


def test_halfway():
    for style in ("linear", "cosine"):
        schedule = OptimizerArguments(lr=1.0, min_lr=0.2, lr_decay_style=style)
        assert learning_rate(10, schedule, TOTAL) == pytest.approx(0.6)


def test_the_flag_offers_the_decays_of_the_table() -> None:
    assert set(get_args(get_type_hints(OptimizerArguments)["lr_decay_style"])) == set(DECAYS)
