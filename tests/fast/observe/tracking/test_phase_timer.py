"""Seconds add up per phase, and reading resets them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.observe.console import PhaseTimer


@given(st.lists(st.tuples(st.sampled_from(["generate", "train"]), st.floats(0, 10))))
def test_added_seconds_accumulate_by_phase(additions: list[tuple[str, float]]) -> None:
    timer = PhaseTimer()
    for name, seconds in additions:
        timer.add(name, seconds)
    metrics = timer.metrics()
    for name in {name for name, _ in additions}:
        assert math.isclose(metrics[f"time/{name}"], sum(s for n, s in additions if n == name), rel_tol=DOUBLE_ERROR)
    assert set(timer.metrics()) == {"time/step"}, "reading resets the seconds"


def test_a_phase_lies_within_the_step() -> None:
    timer = PhaseTimer()
    with timer.phase("train"), timer.phase("log_probs"):
        sum(range(1000))
    metrics = timer.metrics()
    assert 0 < metrics["time/log_probs"] <= metrics["time/train"] <= metrics["time/step"]


def test_a_failing_phase_still_counts() -> None:
    timer = PhaseTimer()
    with pytest.raises(KeyError), timer.phase("generate"):
        raise KeyError
    assert timer.metrics()["time/generate"] > 0


def test_a_step_timed_by_hand_wins() -> None:
    timer = PhaseTimer()
    timer.add("step", 12.5)
    assert timer.metrics() == {"time/step": 12.5}
