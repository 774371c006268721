"""Two runs: settings that differ, the first step at which metrics differ, and one page of both."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from run_folder import SETTINGS, healthy_row, write_header, write_rows

from miles.commands import compare
from miles.observe.report.comparison import Comparison

STEPS = 20


def write(folder: Path, lr: float = 1e-5, change_from: int = STEPS + 1, change: float = 0.5) -> Path:
    write_header(folder, SETTINGS | {"optimizer": {"lr": lr}, "tracking": {"output_dir": str(folder)}})
    rows = {step: healthy_row(step, STEPS) | {"time/step": step * lr * 1e6} for step in range(1, STEPS + 1)}
    for step in range(change_from, STEPS + 1):
        rows[step]["rollout/reward"] += change
    write_rows(folder, rows.items())
    return folder


def test_settings_that_differ_are_listed_without_the_folders(tmp_path: Path) -> None:
    comparison = Comparison([write(tmp_path / "a"), write(tmp_path / "b", lr=1e-6)])
    assert comparison.settings() == [("optimizer.lr", ["1e-05", "1e-06"])]


def test_the_first_step_at_which_a_metric_differs_is_found(tmp_path: Path) -> None:
    comparison = Comparison([write(tmp_path / "a"), write(tmp_path / "b", change_from=7), write(tmp_path / "c")])
    (difference,) = comparison.differences()
    assert (difference.metric, difference.step) == ("rollout/reward", 7)
    assert difference.values[1] - difference.values[0] == pytest.approx(0.5)


def test_equal_runs_do_not_differ_whatever_their_seconds(tmp_path: Path) -> None:
    comparison = Comparison([write(tmp_path / "a"), write(tmp_path / "b", lr=1e-6)])
    assert comparison.differences() == []
    assert "no metric differs" in comparison.text()


def test_a_difference_within_the_tolerance_is_none(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a"), write(tmp_path / "b", change_from=7, change=1e-9)]
    assert Comparison(folders).differences() and not Comparison(folders, tolerance=1e-6).differences()


def test_the_command_prints_and_writes_a_page_of_all_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write(tmp_path / "a"), write(tmp_path / "b", lr=1e-6, change_from=7)]
    page = tmp_path / "new" / "page.html"
    assert compare.main([*map(str, folders), "--page", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "optimizer.lr" in printed and "first difference: step 7" in printed
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])  # type: ignore[index]
    reward = next(chart for chart in data["overview"]["charts"] if chart["title"] == "Reward")
    assert [series["label"] for series in reward["series"]] == ["a", "b"]
    curves = [data["metrics"]["values"][series["key"]] for series in reward["series"]]
    assert curves[0][5] == curves[1][5] and curves[0][6] != curves[1][6]


def test_one_run_and_a_folder_without_one_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(write(tmp_path / "a"))])
    assert "two runs" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path / "a"), str(tmp_path)])
    assert "run.json" in capsys.readouterr().err


def test_a_page_does_not_replace_a_file_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    for path, fault in ((first / "metrics.jsonl", "is a file of a run"), (first, "is a folder")):
        with pytest.raises(SystemExit, match="2"):
            compare.main([str(first), str(second), "--page", str(path)])
        assert f"--page {path}: {fault}" in capsys.readouterr().err
    assert (first / "metrics.jsonl").read_text().startswith('{"step"')


def test_a_page_that_has_no_room_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    page.symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(write(tmp_path / "a")), str(write(tmp_path / "b")), "--page", str(page)])
    assert re.search(rf"{page} was not written, because the disk .* is full\n$", capsys.readouterr().err)


@pytest.mark.parametrize("tolerance", ["-1", "nan", "inf"])
def test_a_tolerance_is_finite_and_not_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tolerance: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        compare.main([str(tmp_path), str(tmp_path), f"--tolerance={tolerance}"])
    assert f"--tolerance {tolerance}: must be finite and at least 0" in capsys.readouterr().err


def test_runs_of_one_name_are_distinguished_by_their_paths(tmp_path: Path) -> None:
    folders = [write(tmp_path / "one" / "run"), write(tmp_path / "two" / "run")]
    assert Comparison(folders).names == [str(folder) for folder in folders]
