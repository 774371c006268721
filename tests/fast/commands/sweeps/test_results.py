"""The comparison of written run folders: tables, files and the data of the page."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweep_files import planned, write_run_of
from tolerance import DOUBLE_ERROR, digits

from miles.commands import sweep as command
from miles.commands.sweeps.results import (
    MOST_POINTS,
    Results,
    over_seeds,
    page_data,
    text_table,
    write_page,
    write_tables,
)
from miles.commands.sweeps.swept_run import SweptRun

SEEDS = [1, 2, 3, 4]
VARIANTS = {"base": {}, "better": {"eps_clip_high": "0.28"}, "base-again": {"seed_offset": "50"}}
GAIN = 0.25


def metrics(variant: str, seed: int, step: int) -> dict[str, float]:
    """A curve that rises with the step, shifted by the seed; "better" gains from step 1 on; held-out every 5 steps."""
    own = seed / 10 if variant != "base-again" else (seed * 7 % 4) / 10
    reward = own + step / 100 + (GAIN if variant == "better" else 0.0)
    return {"rollout/reward": reward, "time/step": 1.0} | ({"eval/held/accuracy": reward} if step % 5 == 0 else {})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Results:
    definition, runs = planned(
        tmp_path_factory.mktemp("whole"), variants=VARIANTS, seeds=[str(s) for s in SEEDS], last="3"
    )
    return Results(definition, [write_run_of(run, metrics) for run in runs])


def row(results: Results, metric: str, summary: str, variant: str) -> Any:
    (match,) = [r for r in results.rows() if (r.metric, r.summary, r.variant) == (metric, summary, variant)]
    return match


def test_every_run_gives_one_value_to_each_row(whole: Results) -> None:
    assert whole.finished == 12 and whole.table_metrics == ["eval/held/accuracy", "rollout/reward", "time/step"]
    assert len(whole.rows()) == 3 * 3 * 3
    expected = {"final": 10, "mean_of_last": (8 + 9 + 10) / 3, "area": 5.5}
    for summary, step in expected.items():
        values = row(whole, "rollout/reward", summary, "base").values
        assert values == pytest.approx({seed: seed / 10 + step / 100 for seed in SEEDS})
    assert row(whole, "eval/held/accuracy", "area", "base").values == pytest.approx({s: s / 10 + 0.075 for s in SEEDS})


def test_differences_are_paired_by_seed(whole: Results) -> None:
    better = row(whole, "rollout/reward", "final", "better")
    assert better.difference.mean == pytest.approx(GAIN) and better.difference.count == 4
    assert better.difference.high - better.difference.low == pytest.approx(0.0, abs=DOUBLE_ERROR)
    assert better.mean.high - better.mean.low > 0.1, "the seeds differ more than the variants"
    again = row(whole, "rollout/reward", "final", "base-again")
    assert again.difference.low < 0 < again.difference.high, "an A/A pair"
    assert row(whole, "rollout/reward", "final", "base").difference is None


def test_settings_that_differ_are_those_of_the_variants(whole: Results) -> None:
    settings = dict(whole.settings())
    assert settings == {"loss.eps_clip_high": ["–", "0.28", "–"], "seed_offset": ["0", "0", "50"]}


def test_the_files_have_the_whole_table(whole: Results, tmp_path: Path) -> None:
    write_tables(whole, tmp_path)
    table = json.loads((tmp_path / "table.json").read_text())
    assert len(table["rows"]) == 27 and table["baseline"] == "base" and table["last"] == 3
    assert table["settings"]["loss.eps_clip_high"] == {"base": "–", "better": "0.28", "base-again": "–"}
    assert [run["is_finished"] for run in table["runs"]] == [True] * 12
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 27
    for as_json, as_csv in zip(table["rows"], rows, strict=True):
        assert (as_json["metric"], as_json["summary"], as_json["variant"]) == (
            as_csv["metric"],
            as_csv["summary"],
            as_csv["variant"],
        )
        assert float(as_csv["mean"]) == pytest.approx(as_json["mean"]["mean"])
        if as_json["difference"] is None:
            assert as_csv["difference_mean"] == as_csv["baseline"] == ""
        else:
            low = as_json["difference"]["low"]
            assert float(as_csv["difference_low"]) == pytest.approx(low, rel=digits(8), abs=DOUBLE_ERROR)
            assert as_csv["difference_count"] == "4"


def test_the_page_has_curves_with_bands_and_the_tables(whole: Results, tmp_path: Path) -> None:
    page = write_page(whole, tmp_path).read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])  # type: ignore[index]
    assert data == json.loads(json.dumps(page_data(whole)))
    overview, values = data["overview"], data["metrics"]["values"]
    assert [table["title"] for table in overview["tables"]] == [
        "Difference from base, at the same seed",
        "Means over the seeds",
        "Settings that differ",
        "Runs",
    ]
    assert len(overview["tables"][0]["rows"]) == 2 * 3
    reward = next(chart for chart in overview["charts"] if chart["title"] == "Reward")
    assert [series["label"] for series in reward["series"]] == ["base", "better", "base-again"]
    base = reward["series"][0]
    assert data["metrics"]["steps"] == list(range(1, 11))
    exact = over_seeds({seed: seed / 10 + 0.05 for seed in SEEDS})
    assert values[base["key"]][4] == pytest.approx(exact.mean)
    # The band has fewer resamples than the interval.
    assert values[base["low"]][4] == pytest.approx(exact.low, abs=0.03)
    assert values[base["high"]][4] == pytest.approx(exact.high, abs=0.03)
    held_out = next(chart for chart in overview["charts"] if chart["title"] == "Held-out reward")
    assert [v is not None for v in values[held_out["series"][0]["key"]]] == [step % 5 == 0 for step in range(1, 11)]


def test_long_curves_are_means_over_stretches(tmp_path: Path) -> None:
    definition, (run,) = planned(tmp_path)
    steps = 2 * MOST_POINTS + 5
    results = Results(
        definition, [write_run_of(run, lambda variant, seed, step: {"rollout/reward": float(step)}, steps)]
    )
    data = page_data(results)["metrics"]
    (curve,) = [values for key, values in data["values"].items() if key.startswith("0\nmean\n")]
    assert len(curve) == len(data["steps"]) == MOST_POINTS and data["steps"][-1] == steps
    begins = [1, *(end + 1 for end in data["steps"][:-1])]
    assert curve == pytest.approx([(a + b) / 2 for a, b in zip(begins, data["steps"], strict=True)])


def test_unfinished_runs_are_left_out_and_listed(tmp_path: Path) -> None:
    definition, runs = planned(tmp_path, variants={"a": {}, "b": {"lr": "1e-5"}}, seeds=["1", "2"])
    swept = [write_run_of(run, metrics, 10 if (run.variant, run.seed) != ("b", 2) else 4) for run in runs]
    results = Results(definition, swept)
    difference = row(results, "rollout/reward", "final", "b")
    assert (difference.mean.count, difference.difference.count) == (1, 1) and math.isnan(difference.difference.low)
    assert results.finished == 3
    listed = page_data(results)["overview"]["tables"][-1]["rows"]
    assert [state for _, state, *_ in listed] == ["finished", "finished", "finished", "not started"]
    write_tables(results, tmp_path)
    assert json.loads((tmp_path / "table.json").read_text())["rows"][1]["difference"]["low"] is None


def test_a_sweep_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    definition, runs = planned(tmp_path)
    results = Results(definition, [SweptRun(run) for run in runs])
    assert text_table(results) == "no run is finished"
    assert page_data(results)["overview"]["tiles"][0]["value"] == "0 of 1"


def test_the_command_writes_the_page_alone_and_names_metrics_that_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["rollout/reward", "train/no_such"]
    definition, runs = planned(tmp_path, variants={"a": {}, "b": {"lr": "1e-5"}}, seeds=["1", "2"], metrics=names)
    for run in runs:
        write_run_of(run, metrics)
    words = [str(definition.path), "--out", str(tmp_path / "out"), "--page-only"]
    assert command.main(words) == 0
    printed = capsys.readouterr().out
    assert "no finished run has train/no_such" in printed and "difference from a" in printed
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"sweep.html", "table.json", "table.csv"}
    assert np.isclose(json.loads((tmp_path / "out" / "table.json").read_text())["rows"][0]["mean"]["mean"], 0.25)
