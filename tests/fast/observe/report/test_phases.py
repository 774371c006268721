"""Each second of an iteration is in one phase."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.observe.metrics_file import MetricsFile
from miles.observe.page import phase_bars, seconds_by_phase
from miles.observe.run_files import METRICS, RunFiles

seconds = st.floats(0.01, 50)


@given(seconds, seconds, seconds, st.lists(st.floats(0.01, 0.25), min_size=4, max_size=4), seconds)
def test_phases_add_up_to_the_wall_time(generate: float, train: float, sync: float, parts, rest: float) -> None:
    wall = generate + train + sync + rest
    names = ("time/log_probs", "time/token_selection", "time/forward_backward", "time/optimizer")
    inside = dict(zip(names, parts, strict=True))
    row = {"time/generate": generate, "time/train": train, "time/sync_weights": sync, "time/step": wall}
    phases = seconds_by_phase(row | {name: share * train for name, share in inside.items()})
    assert sum(phases.values()) == pytest.approx(wall)
    assert "train" not in phases
    assert phases["token_selection"] == pytest.approx(parts[1] * train)


def test_parts_that_a_clock_measured_longer_than_the_whole_are_scaled() -> None:
    phases = seconds_by_phase({"time/step": 10.0, "time/train": 8.0, "time/forward_backward": 10.0})
    assert phases == {"forward_backward": 8.0, "train, other": 0.0, "other": 2.0}


def test_generation_that_overlaps_the_step_is_not_counted() -> None:
    phases = seconds_by_phase({"time/step": 10.0, "time/train": 8.0, "time/generate": 1.0, "time/rollout": 9.0})
    assert sum(phases.values()) == 10.0


def test_the_steps_of_an_iteration_are_one_bar(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.append_metrics(1, {"time/forward_backward": 3.0, "time/log_probs": 1.0})
    files.append_metrics(2, {"time/forward_backward": 4.0, "time/train": 9.0, "time/step": 10.0})
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    bars = phase_bars(metrics, None, None, 100)
    assert bars["steps"] == [2]
    expected = {"log_probs": [1.0], "forward_backward": [7.0], "train, other": [1.0], "other": [1.0]}
    assert bars["phases"] == expected


def test_many_iterations_are_averaged_into_few_bars(tmp_path: Path) -> None:
    for step in range(1, 101):
        RunFiles(tmp_path).append_metrics(step, {"time/step": float(step)})
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    bars = phase_bars(metrics, None, None, 10)
    assert bars["per_bar"] == 10 and bars["steps"] == list(range(10, 101, 10))
    assert bars["phases"]["other"][0] == pytest.approx(5.5)
