"""metrics.jsonl and samples.jsonl round-trip, and a resumed run repeats no step."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folder import read_samples

from miles.observe.run_files import METRICS, RunFiles, SampleRecord, dump_line

names = st.text(min_size=1, max_size=12).filter(lambda name: name != "step")
rows = st.lists(st.dictionaries(names, st.floats(), max_size=4), max_size=6)
texts = st.text(max_size=30) | st.just("\ud800 unpaired")
records = st.builds(SampleRecord, texts, texts, st.none() | st.floats(-1, 1), st.none() | texts, st.just("completed"))


def readable(value: float) -> float:
    """Return the value as read back: JSON has neither NaN nor infinity."""
    return value if math.isfinite(value) else math.nan


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


@settings(max_examples=50)
@given(rows)
def test_metrics_round_trip(steps: list[dict[str, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(Path(folder))
        for step, values in enumerate(steps):
            files.append_metrics(step, values)
        read = files.read_metrics()
    assert [row.pop("step") for row in read] == list(range(len(steps)))
    for row, values in zip(read, steps, strict=True):
        assert row.keys() == values.keys()
        assert all(same(row[name], readable(value)) for name, value in values.items())


@settings(max_examples=50)
@given(st.lists(records, min_size=1, max_size=4))
def test_samples_round_trip(samples: list[SampleRecord]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(Path(folder))
        files.append_samples(7, samples)
        assert read_samples(files.output_dir) == {7: samples}


def test_a_line_is_strict_json_at_any_depth() -> None:
    row = {"reward_parts": {"format": math.inf}, "log_probs": [-1.0, math.nan], "loss": math.nan, "text": "NaN"}
    read = json.loads(dump_line(row), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read == {"reward_parts": {"format": None}, "log_probs": [-1.0, None], "loss": None, "text": "NaN"}


@settings(max_examples=30)
@given(st.integers(0, 8), st.integers(0, 10))
def test_resume_keeps_exactly_the_earlier_steps(length: int, resumed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = RunFiles(Path(folder))
        for step in range(length):
            files.append_metrics(step, {"rollout/reward": float(step)})
            files.append_samples(step, [SampleRecord("p", "r", 1.0, None, "completed")])
        files.drop_from(resumed)
        steps = list(range(min(length, resumed)))
        assert [row["step"] for row in files.read_metrics()] == steps
        assert list(read_samples(files.output_dir)) == steps


def test_rows_of_one_step_are_joined(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.append_metrics(0, {"rollout/reward": 0.5})
    files.append_metrics(0, {"eval/unseen/accuracy": 0.25})
    assert files.read_metrics() == [{"step": 0, "rollout/reward": 0.5, "eval/unseen/accuracy": 0.25}]


def test_a_line_cut_by_a_kill_is_left_out_and_resume_removes_it(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.append_metrics(0, {"a": 1.0})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 1, "a"')
    assert len(files.read_metrics()) == 1
    files.drop_from(1)
    files.append_metrics(1, {"a": 2.0})
    assert [row["a"] for row in files.read_metrics()] == [1.0, 2.0]


@pytest.mark.parametrize("broken", ["{oops}", "[1, 2]", "[" * 100_000, '{"step": ' + "9" * 6000 + "}", "\0" * 100])
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / METRICS).write_text('{"step": 0}\n' + broken + "\n")
    for use in (RunFiles(tmp_path).read_metrics, lambda: RunFiles(tmp_path).drop_from(1)):
        with pytest.raises(ValueError, match=rf"{METRICS}:2: "):
            use()


@pytest.mark.parametrize("step", ["null", '"1"', "1.5", "true"])
def test_a_row_without_a_step_is_named_and_a_run_does_not_resume_beside_it(tmp_path: Path, step: str) -> None:
    whole = f'{{"step": 0}}\n{{"step": {step}}}\n'
    (tmp_path / METRICS).write_text(whole)
    for use in (RunFiles(tmp_path).read_metrics, lambda: RunFiles(tmp_path).drop_from(1)):
        with pytest.raises(ValueError, match=f"{METRICS}:2: has no whole number as 'step'; remove the line"):
            use()
    assert (tmp_path / METRICS).read_text() == whole
