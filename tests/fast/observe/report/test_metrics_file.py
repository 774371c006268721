"""metrics.jsonl is read as it grows, and ranges lose no spike."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.observe.metrics_file import MetricsFile
from miles.observe.run_files import METRICS, RunFiles


def columns(metrics: MetricsFile) -> dict[int, dict[str, float]]:
    return {
        step: {name: metrics.column(name)[i] for name in metrics.names if not math.isnan(metrics.column(name)[i])}
        for i, step in enumerate(metrics.steps)
    }


rows = st.lists(
    st.tuples(st.integers(0, 30), st.dictionaries(st.sampled_from("abc"), st.floats(-9, 9), max_size=3)), max_size=30
)


@pytest.mark.parametrize("row", [f'{{"step": {10**20}, "x": 1}}', f'{{"step": 1, "x": {10**400}}}'])
def test_a_number_that_no_column_holds_is_named(tmp_path: Path, row: str) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n' + row + "\n")
    with pytest.raises(ValueError, match=f"{METRICS}:2: int too .*; remove the line or the file"):
        MetricsFile(tmp_path / METRICS).refresh()


@settings(max_examples=40, deadline=None)
@given(rows, st.integers(1, 5))
def test_growing_files_are_read_as_whole_ones(tmp_path_factory: pytest.TempPathFactory, rows, portion: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    files, growing = RunFiles(folder), MetricsFile(folder / METRICS)
    for number, (step, values) in enumerate(rows):
        files.append_metrics(step, values)
        if number % portion == 0:
            assert growing.refresh()
    growing.refresh()
    expected = {int(row["step"]): {n: v for n, v in row.items() if n != "step"} for row in files.read_metrics()}
    assert columns(growing) == expected
    assert list(growing.steps) == sorted(expected)
    assert not growing.refresh()


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    metrics = MetricsFile(path)
    metrics.refresh()
    assert list(metrics.steps) == [1]
    with path.open("a") as file:
        file.write(": 2.0}\n")
    metrics.refresh()
    assert list(metrics.column("a")) == [1.0, 2.0]


def test_a_file_that_a_resumed_run_cut_back_is_read_again(tmp_path: Path) -> None:
    files, metrics = RunFiles(tmp_path), MetricsFile(tmp_path / METRICS)
    for step in range(5):
        files.append_metrics(step, {"a": float(step)})
    metrics.refresh()
    before = metrics.revision
    files.drop_from(3)
    files.append_metrics(3, {"a": 30.0})
    assert metrics.refresh()
    assert list(metrics.column("a")) == [0.0, 1.0, 2.0, 30.0]
    assert metrics.revision != before


def test_nulls_and_text_are_no_measurements(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1, "a": null, "b": "x", "c": 3}\n')
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    assert metrics.names == ["c"]
    assert metrics.points(["a", "c"], None, None, 10)["values"] == {"a": [None], "c": [3.0]}


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 1}\n{"a": 2}\n')
    with pytest.raises(ValueError, match=rf"{METRICS}:2: the row has no step"):
        MetricsFile(tmp_path / METRICS).refresh()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.none() | st.floats(-9, 9).map(lambda v: float(f"{v:.3g}")), min_size=1, max_size=200),
    st.integers(2, 40),
)
def test_a_cut_range_keeps_extremes_and_its_size(tmp_path_factory: pytest.TempPathFactory, values, limit: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    for step, value in enumerate(values):
        RunFiles(folder).append_metrics(step, {} if value is None else {"a": value})
    metrics = MetricsFile(folder / METRICS)
    metrics.refresh()
    answer = metrics.points(["a"], None, None, limit)
    assert len(answer["steps"]) == len(answer["values"]["a"]) <= max(limit, 2)
    measured = [v for v in values if v is not None]
    assert answer["exact"] or answer["last"]["a"] == (measured[-1] if measured else None)
    points = [v for v in answer["values"]["a"] if v is not None]
    assert (min(points, default=0), max(points, default=0)) == (min(measured, default=0), max(measured, default=0))


def test_a_range_of_steps_is_cut_out(tmp_path: Path) -> None:
    for step in (0, 2, 4, 6):
        RunFiles(tmp_path).append_metrics(step, {"a": float(step)})
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    assert metrics.points(["a"], 2, 5, 10) == {"steps": [2, 4], "values": {"a": [2.0, 4.0]}, "exact": True}
    assert metrics.points(["a"], 7, None, 10)["steps"] == []


def test_a_file_that_is_gone_leaves_nothing(tmp_path: Path) -> None:
    RunFiles(tmp_path).append_metrics(0, {"a": 1.0})
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    os.rename(tmp_path / METRICS, tmp_path / "aside")
    assert metrics.refresh() and not metrics.steps
