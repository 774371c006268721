"""The tracker as a run uses it: all sinks, resuming, and the final report."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_folder import read_samples
from small_checkpoint import save_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.base.text import InputError
from miles.config.checkpoint import CheckpointArguments
from miles.config.tracking import TrackingArguments
from miles.observe.metrics_file import MetricsFile
from miles.observe.page import RunView, report_data
from miles.observe.report.sink import ReportSink
from miles.observe.run_files import (
    METRICS,
    REPORT,
    SAMPLES,
    TENSORBOARD,
    RunFiles,
    RunHeader,
    RunIdentity,
    SampleRecord,
)
from miles.observe.sinks import check_packages, log_in
from miles.observe.tracker import Tracker
from miles.run.failures import exit_with_message
from miles.run.stop_requests import StopRequests
from miles.types.metrics import Metric

HEADER = RunHeader("a run", {"tracking": {"wandb_key": "sesame"}}, "words", "1/N", total_steps=4)


def arguments(folder: Path, **changes) -> TrackingArguments:
    return TrackingArguments(output_dir=str(folder), **changes)


def run(tracking: TrackingArguments, steps: range, resume: bool = False) -> None:
    """Log the steps; the reward of step n is n / 4."""
    with Tracker(tracking, HEADER, [ReportSink(tracking)]) as tracker:
        if resume:
            tracker.resume(steps.start)
        for step in steps:
            tracker.log(step, {"rollout/reward": Metric(step, 4.0), "time/step": 1})
            tracker.log_samples(step, [SampleRecord(f"p{i}", "r", 1.0, None, "completed") for i in range(8)])


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / TENSORBOARD))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_every_sink_has_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(arguments(tmp_path), range(4))
    assert [row["rollout/reward"] for row in RunFiles(tmp_path).read_metrics()] == [0.0, 0.25, 0.5, 0.75]
    assert scalars(tmp_path, "rollout/reward") == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert capsys.readouterr().out.count("\nstep ") == 4
    assert "rollout/reward" in (tmp_path / REPORT).read_text()


def test_tensorboard_has_a_table_of_answers(tmp_path: Path) -> None:
    with Tracker(arguments(tmp_path, report_samples=1), HEADER) as tracker:
        answer = SampleRecord("1 | 2\n# no heading", "<b>*3*</b>\ud800", 0.5, {"a": 1}, "completed")
        tracker.log_samples(2, [answer, answer])
    events = EventAccumulator(str(tmp_path / TENSORBOARD))
    events.Reload()
    assert events.SummaryMetadata("samples").plugin_data.plugin_name == "text"
    (event,) = events.Tensors("samples")
    heading, _, row = event.tensor_proto.string_val[0].decode().split("\n")
    assert event.step == 2 and heading.startswith("| step | group | prompt | response | label | reward |")
    cells = r'| 2 |  | 1 \| 2<br>\# no heading | &lt;b&gt;\*3\*&lt;/b&gt;\ud800 | \{"a": 1\} | 0.5 |'
    assert row.startswith(cells)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    run(arguments(tmp_path / "unbroken"), range(4))
    run(arguments(tmp_path / "resumed"), range(3))
    run(arguments(tmp_path / "resumed"), range(2, 4), resume=True)
    unbroken, resumed = RunFiles(tmp_path / "unbroken"), RunFiles(tmp_path / "resumed")
    assert resumed.read_metrics() == unbroken.read_metrics()
    assert read_samples(resumed.output_dir) == read_samples(unbroken.output_dir)
    reports = [report_data(RunView(tmp_path / name), 4) for name in ("resumed", "unbroken")]
    for report in reports:
        assert report["overview"].pop("revision") and report["overview"].pop("folder")
    assert reports[0] == reports[1]
    assert scalars(tmp_path / "resumed", "rollout/reward") == scalars(tmp_path / "unbroken", "rollout/reward")


def test_a_new_run_sets_an_earlier_one_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(arguments(tmp_path), range(4))
    run(arguments(tmp_path), range(1))
    assert len(RunFiles(tmp_path).read_metrics()) == 1
    assert len(RunFiles(tmp_path / "earlier-1").read_metrics()) == 4
    assert len(scalars(tmp_path, "rollout/reward")) == 1
    assert "earlier-1" in capsys.readouterr().out


def test_metrics_stay_within_their_bound_and_every_reader_works(tmp_path: Path) -> None:
    """Steps 2, 4, … end an iteration, and every 20th has an evaluation too. A row has some 4 KB."""
    many = {f"train/{'x' * 4000}": 1.0}
    tracking = arguments(tmp_path, metrics_max_mb=1.0, no_report=True)
    path = tmp_path / METRICS
    reader, live = MetricsFile(path), 0
    with Tracker(tracking, HEADER) as tracker:
        for step in range(1, 801):
            rewards = {} if step % 2 else {"rollout/reward": step / 8}
            tracker.log(step, many | rewards | ({} if step % 20 else {"eval/a/accuracy": step / 8}))
            live += step % 100 == 0 and reader.refresh()
        assert path.stat().st_size <= 1_000_000
    reader.refresh()
    steps = list(reader.steps)
    assert live == 8 and steps[:20] == list(range(1, 21)) and steps[-40:] == list(range(761, 801))
    assert 0 < len([each for each in steps if 20 < each <= 400]) < len([each for each in steps if each > 400])
    for name in ("rollout/reward", "eval/a/accuracy"):
        measured = [step for step, value in zip(steps, reader.column(name), strict=True) if value == value]
        assert len([each for each in measured if each <= 400]) >= 2 and all(step % 2 == 0 for step in measured)
        assert all(reader.column(name)[steps.index(step)] == step / 8 for step in measured)
    assert RunView(tmp_path).overview()
    with Tracker(tracking, HEADER) as tracker:
        tracker.resume(790)
        tracker.log(790, {"train/0": 1.0})
    assert [row["step"] for row in RunFiles(tmp_path).read_metrics()][-2:] == [789, 790]


def test_tensorboard_stays_within_the_bound_and_keeps_the_newest_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step has some 4 KB. The run is resumed in the middle, and reaches the bound before and after."""
    many = {f"train/{'x' * 4000}": 1.0}
    tracking = arguments(tmp_path, metrics_max_mb=1.0, no_report=True)
    for first, last in ((1, 400), (351, 800)):
        with Tracker(tracking, HEADER) as tracker:
            if first > 1:
                tracker.resume(first)
            for step in range(first, last + 1):
                tracker.log(step, many | {"rollout/reward": float(step)})
                used = sum(file.stat().st_size for file in (tmp_path / TENSORBOARD).iterdir())
                assert used < 1_000_000 + 5_000, "the bound and a step"
        points = scalars(tmp_path, "rollout/reward")
        assert points == [(step, float(step)) for step in range(points[0][0], last + 1)] and len(points) > 100
        assert capsys.readouterr().err.count(f"{tmp_path / TENSORBOARD} has reached --metrics-max-mb") == 1
    (last_file, *_) = sorted((tmp_path / TENSORBOARD).iterdir(), reverse=True)
    assert last_file.stat().st_size < 300_000


def test_all_samples_are_stored(tmp_path: Path) -> None:
    run(arguments(tmp_path, report_samples=4), range(1))
    assert [s.prompt for s in read_samples(tmp_path)[0]] == [f"p{i}" for i in range(8)]


def test_a_run_that_logged_nothing_does_not_touch_an_earlier_one(tmp_path: Path) -> None:
    run(arguments(tmp_path), range(2))
    run(arguments(tmp_path), range(0))
    assert len(RunFiles(tmp_path).read_metrics()) == 2


def test_missing_packages_are_named_with_their_flags_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wandb", "mlflow", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    check_packages(TrackingArguments())
    with pytest.raises(InputError, match=r"--use-wandb.*miles\[wandb\].*--use-mlflow.*--prometheus-port.*miles\[prom"):
        check_packages(TrackingArguments(use_wandb=True, use_mlflow=True, prometheus_port=0))


class FakeMlflow:
    """A client of MLflow whose server fails from ``log_batch`` on."""

    def __init__(self, tracking_uri: str | None) -> None:
        self.ended: list[str] = []

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_batch(self, run: str, metrics: Sequence[object] = (), params: Sequence[object] = ()) -> None:
        if metrics:
            raise ConnectionError("the server is gone")

    def set_terminated(self, run: str, status: str) -> None:
        self.ended.append(status)


def test_a_service_that_fails_is_one_note_and_knows_that_the_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entities = SimpleNamespace(Metric=lambda *arguments: arguments, Param=lambda *arguments: arguments)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=FakeMlflow, entities=entities))
    closed: list[str] = []

    class Broken:
        def log(self, step: int, values: Mapping[str, float]) -> None:
            closed.append("logged")

        def close(self) -> None:
            closed.append("closed")
            raise OSError("disk full")

    tracker = Tracker(arguments(tmp_path, use_mlflow=True), HEADER, [Broken(), ReportSink(arguments(tmp_path))])
    with pytest.raises(KeyError), tracker:
        for step in (1, 2):
            tracker.log(step, {"train/loss": 0.5})
        raise KeyError("the failure itself")
    output = capsys.readouterr().err
    assert output.count("--use-mlflow: not all was recorded (ConnectionError") == 1 and "disk full" in output
    assert tracker._mlflow is not None and tracker._mlflow._client.ended == ["FAILED"]
    assert closed == ["logged", "logged", "closed"] and (tmp_path / REPORT).exists()


FILES = {
    METRICS: lambda tracker: tracker.log(3, {"train/loss": 0.5}),
    SAMPLES: lambda tracker: tracker.log_samples(3, [SampleRecord("p", "r", 1.0, None, "completed")]),
}


RUN_A, RUN_B = RunIdentity("aaa", "2026-01-01 10:00:00"), RunIdentity("bbb", "2026-01-02 10:00:00")


def run_as(identity: RunIdentity | None, folder: Path, steps: range, resumes: bool = False) -> None:
    """Log the steps of a run that knows its identity, or resume the run of that identity at the first of them."""
    new = RunIdentity.new() if resumes or identity is None else identity
    with Tracker(arguments(folder), replace(HEADER, run=new.to_state())) as tracker:
        if resumes:
            tracker.resume(steps.start, identity)
        for step in steps:
            tracker.log(step, {"rollout/reward": 1.0})
            tracker.log_samples(step, [SampleRecord("p", "r", 1.0, None, "completed")])


def steps_in(folder: Path) -> tuple[list[int], list[int]]:
    files = RunFiles(folder)
    return [int(row["step"]) for row in files.read_metrics()], [*read_samples(files.output_dir)]


def test_a_gap_in_the_metrics_of_a_run_that_resumes_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(arguments(tmp_path), range(3))
    run(arguments(tmp_path), range(3, 5), resume=True)
    assert "its metrics end" not in capsys.readouterr().out
    run(arguments(tmp_path), range(7, 9), resume=True)
    note = "its metrics end at step 4, and this run continues after step 6; the rows in between are missing"
    assert f"--output-dir {tmp_path}: {note}" in capsys.readouterr().out


def test_a_run_that_resumes_where_another_has_its_metrics_moves_them_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as(RUN_B, tmp_path, range(1, 7))
    run_as(RUN_A, tmp_path, range(4, 6), resumes=True)
    assert steps_in(tmp_path / "earlier-1") == ([1, 2, 3, 4, 5, 6],) * 2
    assert RunFiles(tmp_path / "earlier-1").run == RUN_B
    assert steps_in(tmp_path) == ([4, 5],) * 2 and RunFiles(tmp_path).run == RUN_A
    output = " ".join(capsys.readouterr().out.split())
    assert f"held the metrics of {RUN_B}, and this run continues {RUN_A}; the files of the other are now in" in output


def test_a_run_that_resumes_its_own_metrics_continues_them_without_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_as(RUN_A, tmp_path, range(1, 4))
    run_as(RUN_A, tmp_path, range(3, 5), resumes=True)
    run_as(RUN_A, tmp_path, range(5, 6), resumes=True)
    assert steps_in(tmp_path) == ([1, 2, 3, 4, 5],) * 2 and not (tmp_path / "earlier-1").exists()
    assert "--output-dir" not in capsys.readouterr().out


def test_metrics_of_an_earlier_version_are_continued_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(arguments(tmp_path), range(1, 4))  # its run.json has no id
    run_as(None, tmp_path, range(3, 5), resumes=True)
    run_as(None, tmp_path, range(4, 6), resumes=True)  # killed before it has saved
    run_as(RUN_A, tmp_path, range(6, 7), resumes=True)
    assert steps_in(tmp_path)[0] == [1, 2, 3, 4, 5, 6] and RunFiles(tmp_path).run == RUN_A
    assert "does not say which run wrote its metrics" in " ".join(capsys.readouterr().out.split())
    run_as(None, tmp_path, range(5, 6), resumes=True)
    assert steps_in(tmp_path)[0] == [5] and steps_in(tmp_path / "earlier-1")[0] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("text", ["", "[1]", '{"run": 3}', '{"run": {"id": 3}}'])
def test_a_damaged_header_names_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    assert RunFiles(tmp_path).run is None


def fill_disk(path: Path) -> None:
    """Have the kernel refuse every byte for ``path``, as a full disk does."""
    path.unlink()
    path.symlink_to("/dev/full")


@pytest.mark.parametrize("name", FILES)
def test_a_disk_that_fills_ends_the_run_with_one_sentence_and_the_rest_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run(arguments(tmp_path), range(1, 3))
    contents = RunFiles(tmp_path).read_metrics(), read_samples(tmp_path)
    copy = (tmp_path / name).read_bytes()
    tracking = arguments(tmp_path)
    capsys.readouterr()
    save_checkpoint(tmp_path / "save", 2)
    section = CheckpointArguments(save=str(tmp_path / "save"))
    with (
        pytest.raises(SystemExit) as ended,
        exit_with_message(section, StopRequests(60.0)),
        Tracker(tracking, HEADER, [ReportSink(tracking)]) as tracker,
    ):
        tracker.resume(3)
        fill_disk(tmp_path / name)
        FILES[name](tracker)
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"miles train: the run stopped: {tmp_path / name} was not written, because the disk ")
    assert " is full; the same command with --load " in line and line.endswith("continues from the last checkpoint")
    (tmp_path / name).unlink()
    (tmp_path / name).write_bytes(copy + b'{"rollout_id": 3, "half a li')  # what did fit of the row
    with Tracker(tracking, HEADER) as tracker:
        tracker.resume(3)
    assert (RunFiles(tmp_path).read_metrics(), read_samples(tmp_path)) == contents


@pytest.mark.parametrize("first", [1, 3])
def test_a_disk_without_room_for_tensorboard_is_one_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Its disk fills before step ``first``; the tracker opens the file at step 1."""
    opened = Path.open

    def open_full(path: Path, *args: Any, **named: Any) -> Any:
        return opened(Path("/dev/full") if "tfevents" in path.name else path, *args, **named)

    with Tracker(arguments(tmp_path), HEADER) as tracker:
        for step in (1, 2, 3, 4):
            if step == first == 1:
                monkeypatch.setattr(Path, "open", open_full)
            elif step == first:
                monkeypatch.setattr(tracker._tensorboard._writer, "_writer", opened(Path("/dev/full"), "wb"))
            tracker.log(step, {"train/loss": 0.5})
            tracker.log_samples(step, [SampleRecord("p", "r", 1.0, None, "completed")])
    assert len(RunFiles(tmp_path).read_metrics()) == len(read_samples(tmp_path)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path / TENSORBOARD} is not written from now on, because the disk ")
    assert line.endswith(" is full")


def test_a_disk_without_room_for_the_report_is_a_note_and_keeps_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(arguments(tmp_path), range(1, 3))
    earlier = (tmp_path / REPORT).read_bytes()
    (tmp_path / f".{REPORT}.new").symlink_to("/dev/full")
    capsys.readouterr()
    run(arguments(tmp_path), range(3, 4), resume=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: {tmp_path / REPORT} was not written, because the disk ")
    assert line.endswith(f" is full; miles report {tmp_path} shows the run")
    assert (tmp_path / REPORT).read_bytes() == earlier


@pytest.mark.parametrize("suffix", [None, "-[0-9a-f]{6}"])
def test_wandb_gets_the_settings_and_the_steps_but_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str | None
) -> None:
    calls: list[tuple] = []
    wandb_run = SimpleNamespace(
        log=lambda values, step: calls.append(("log", step, values)),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
    )
    fake = SimpleNamespace(
        Table=lambda columns, data: (columns, data),
        login=lambda **arguments: calls.append(("login", arguments)),
        init=lambda **arguments: calls.append(("init", arguments)) or wandb_run,
        run=None,
        teardown=lambda: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    named = {"wandb_key": "sesame", "wandb_host": "h", "wandb_team": "t", "wandb_group": "g"}
    tracking = arguments(tmp_path, use_wandb=True, disable_wandb_random_suffix=suffix is None, **named)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    log_in(tracking)
    with Tracker(tracking, HEADER) as tracker:
        tracker.log(0, {"a": Metric(1.0, 2.0), "b": math.nan})
        tracker.log_samples(1, [SampleRecord("p", "r", 1.0, None, "completed")])
    (_, login), (_, init), (_, step, values), (_, *table), finish = calls
    assert table[0] == 1 and len(table[1]["samples"][1]) == 1
    assert login == {"key": "sesame", "host": "h"}
    assert (init["entity"], init["group"]) == ("t", "g")
    assert re.fullmatch(f"a run{suffix or ''}", init["name"])
    assert "sesame" not in str(init)
    assert (step, values["a"], finish) == (0, 0.5, ("finish", 0))
