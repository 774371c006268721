"""The reproductions: their sweeps are valid and paired, their columns are what they say, their pages are up to date."""

from __future__ import annotations

import json
import math
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from miles.commands.sweeps.definition import plan, read_definition
from miles.config.rules import check_one_process

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "examples" / "reproduce"
sys.path.insert(0, str(FOLDER))

import reproduction_results as results  # noqa: E402

NAMES = sorted(path.parent.name for path in FOLDER.glob("*/sweep.yaml"))


def test_every_reproduction_is_described() -> None:
    assert set(results.REPRODUCTIONS) == set(NAMES) and len(NAMES) >= 2


@pytest.fixture(scope="module")
def with_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the examples, and with the prompts that the sweeps read."""
    folder = tmp_path_factory.mktemp("reproduce")
    (folder / "examples").symlink_to(ROOT / "examples")
    write_tasks = runpy.run_path(str(FOLDER / "numbers" / "write.py"))["write_tasks"]
    write_tasks(folder / "outputs" / "reproduce" / "numbers", seed=1)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_is_valid_and_has_an_a_a_pair(name: str, with_tasks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(with_tasks)
    definition = read_definition(FOLDER / name / "sweep.yaml")
    assert len(definition.seeds) >= 8
    runs = plan(replace(definition, seeds=definition.seeds[:1]), definition.output, check_one_process)
    first = {run.variant: run.settings for run in runs}
    again = [variant for variant in definition.variants if variant.name.endswith(results.AGAIN)]
    assert len(again) == 1 and again[0].seed_offset >= len(definition.seeds), "the same settings, other seeds"
    baseline = first[definition.baseline]
    assert first[again[0].name].loss == baseline.loss and first[again[0].name].optimizer == baseline.optimizer
    assert sum(figure.is_claim for figure in results.REPRODUCTIONS[name].figures) == 1
    assert definition.output.name == name, "where reproduction_results.py looks for it"


def answer(reward: float, length: int, advantage: float, **more: object) -> dict[str, object]:
    values = {"reward": reward, "advantage": advantage, "denominator": 4.0, "rollout_log_probs": [-1.0] * length}
    return {"rollout_id": 2, **values, **more}


def test_columns_of_answers_are_what_they_say(tmp_path: Path) -> None:
    answers = [
        answer(1.0, 4, 0.5, ratios=[1.2, 1.21, 1.28, 1.29]),
        answer(1.0, 2, 0.5),  # no ratios are stored: all are 1
        answer(0.0, results.LONG, -0.5, ratios=[1.25] * results.LONG),  # not a good answer
        answer(0.0, 8, -1.0),
    ]
    steps = [
        {"step": 1, "train/entropy_loss": 0.5},
        {"step": 2, "train/entropy_loss": 0.25, "rollout/tokens": 30.0},
        {"step": 3, "train/entropy_loss": 9.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    columns = [*results.OF_ANSWERS, "entropy", "tokens", "held_out"]
    (row,) = results.iterations(tmp_path, columns)
    assert row["accuracy"] == 0.5
    assert (row["length"], row["length_wrong"], row["length_right"]) == (7.5, 12.0, 3.0)
    assert row["between"] == pytest.approx(2 / 6), "of six tokens of good answers: 1.21 and 1.28"
    long = 0.5 * results.LONG / 4
    assert row["long_weight"] == pytest.approx(long / (long + 8 / 4))
    assert row["long_share"] == pytest.approx(long / (long + 8 / 4 + 0.5 * 6 / 4))
    assert row["share_8_to_15"] == pytest.approx((8 / 4) / (long + 8 / 4 + 0.5 * 6 / 4))
    assert sum(row[f"share_{band}"] for band in results.BANDS) == pytest.approx(1.0)
    assert (row["entropy"], row["tokens"]) == (0.375, 30.0), "of the steps of the iteration"
    assert math.isnan(row["held_out"])


def test_percentiles_are_of_the_ratios_of_all_tokens_of_an_iteration() -> None:
    scored = [answer(1.0, 100, 0.5, log_probs=[-1.0 + math.log(1 + i) for i in range(100)]), answer(0.0, 1, 0.5)]
    by_percent = {percent: results.OF_ANSWERS[f"ratio_{percent}"](scored) for percent in results.PERCENTILES}
    # Ratios of 1 to 100; between two of them the percentile is interpolated by their logarithms.
    assert by_percent == {percent: pytest.approx(1 + 0.99 * percent, rel=0.01) for percent in results.PERCENTILES}
    assert results.OF_ANSWERS["far"](scored) == 0.98, "all but 1 and 2"


def test_a_distribution_is_one_table_of_means_over_seeds() -> None:
    runs = {"a": {1: [{"x": 1.0, "y": 4.0}, {"x": 3.0, "y": 4.0}], 2: [{"x": 2.0, "y": 4.0}]}}
    lines = results.distribution_lines(runs, results.Distribution("Of z", {"x": "low", "y": "high"}))
    assert lines[0] == "**Of z**, mean of all iterations:"
    assert lines[2:] == ["| variant | low | high |", "|---|---|---|", "| `a` | 2 [2, 2] | 4 [4, 4] |"]


def test_a_figure_is_of_the_last_iterations_or_of_all() -> None:
    rows = [{"entropy": math.nan}, *({"entropy": float(i)} for i in range(20))]
    runs = {"a": {1: rows}}
    assert results.of_runs(runs, results.Figure("entropy", "")) == {"a": {1: 14.5}}
    assert results.of_runs(runs, results.Figure("entropy", "", results.OVERALL)) == {"a": {1: 9.5}}


def test_what_is_rarely_measured_is_of_the_last_iterations_too() -> None:
    """Evaluations of the start are not part of "the last 10 iterations" because there are fewer than 10 of them."""
    rows = [{"held_out": float(i) if i % 5 == 0 else math.nan} for i in range(1, 21)]
    assert results.of_runs({"a": {1: rows}}, results.Figure("held_out", "")) == {"a": {1: 17.5}}


def test_runs_are_compared_where_they_have_cost_the_same() -> None:
    def run(cost: float, *accuracies: float) -> list[dict[str, float]]:
        return [{"tokens": cost, "held_out": accuracy} for accuracy in accuracies]

    cheap, costly = run(10.0, math.nan, 0.25, math.nan, 0.5), run(30.0, 0.25, 0.75)
    figure = results.Figure("held_out", "", results.AT_EQUAL_COST, cost="tokens")
    by_variant = results.of_runs({"cheap": {1: cheap, 2: cheap}, "costly": {1: costly, 2: costly[:1]}}, figure)
    # Seed 1: 40 tokens, a third of the way from the first to the second evaluation of the costly run. Seed 2: 30.
    assert by_variant["cheap"] == pytest.approx({1: 0.5, 2: 0.375})
    assert by_variant["costly"] == pytest.approx({1: 0.25 + 0.5 / 3, 2: 0.25})


MEASURED = [name for name in NAMES if (FOLDER / name / "runs.csv").exists()]


@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_what_was_measured_or_says_that_nothing_was(name: str) -> None:
    text = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    match = results.BLOCK.search(text)
    assert match is not None
    if name in MEASURED:
        assert match[0] == f"{results.CAPTION}\n{results.table(FOLDER / name)}"
    else:
        assert match[0] == results.NOT_RUN


def test_the_table_of_the_docs_has_a_row_for_each() -> None:
    rows = results.page(NAMES).splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [f"examples/reproduce/{name}" for name in sorted(NAMES)]
