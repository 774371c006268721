"""Every rule fires on a seeded bad series, and all are silent on a run that learns."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_folder import healthy_row, write_rows

from miles.observe.health import RULES, WINDOW, unhealthy, verdicts
from miles.observe.metrics_file import MetricsFile
from miles.observe.run_files import METRICS
from scripts.pages.flags import flags_reference

STEPS = 40

Row = dict[str, float]


def fired(folder: Path, rows: list[Row]) -> list[str]:
    write_rows(folder, enumerate(rows, 1))
    metrics = MetricsFile(folder / METRICS)
    metrics.refresh()
    return [verdict.rule for verdict in unhealthy(verdicts(metrics, {}))]


def healthy(seed: int = 0) -> list[Row]:
    return [healthy_row(step + 1000 * seed, STEPS) | shape(step) for step in range(1, STEPS + 1)]


def shape(step: int) -> Row:
    """Return the curves that go with the step, whatever the noise's seed."""
    row = healthy_row(step, STEPS)
    return {
        name: row[name]
        for name in (
            "train/entropy_loss",
            "rollout/reward",
            "rollout/response_length",
            "rollout/truncated_fraction",
            "rollout/zero_std_groups",
        )
    }


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_that_learns_is_healthy_at_every_step(tmp_path: Path, seed: int) -> None:
    write_rows(tmp_path, enumerate(healthy(seed), 1))
    assert fired_while_it_grew((tmp_path / METRICS).read_bytes(), tmp_path / "growing") == []


QUICKSTARTS = sorted((Path(__file__).parent / "quickstart_runs").glob("seed_*.jsonl"))
"""Curves of ``miles quickstart --seed N`` on two cores of an AMD EPYC, with the metrics that rules read."""


@pytest.mark.parametrize("run", QUICKSTARTS, ids=[run.stem for run in QUICKSTARTS])
def test_the_quickstart_is_healthy_at_every_step(tmp_path: Path, run: Path) -> None:
    measured = {name for line in run.read_text().splitlines() for name in json.loads(line)}
    assert measured >= {rule.metric for rule in RULES} | {"eval/heldout/accuracy"}
    assert fired_while_it_grew(run.read_bytes(), tmp_path / METRICS) == []


def fired_while_it_grew(rows: bytes, file: Path) -> list[str]:
    """Return the rules that fired at any step, when ``file`` grew row by row."""
    metrics, rules = MetricsFile(file), []
    for row in rows.splitlines(keepends=True):
        with file.open("ab") as end:
            end.write(row)
        metrics.refresh()
        rules += [verdict.rule for verdict in unhealthy(verdicts(metrics, {}))]
    assert len(metrics.steps) == len(rows.splitlines())
    return rules


def stuck(row: Row) -> Row:
    return row | {"rollout/reward": 0.2}


def late(step: int) -> float:
    """Return 0 in the first half of the run, then up to 1."""
    return max(0.0, 2 * step / STEPS - 1)


BAD = {
    "Entropy collapse": lambda step, row: stuck(row) | {"train/entropy_loss": 1.5 * math.exp(-8 * late(step))},
    "Clip fraction": lambda step, row: row | {"train/pg_clipfrac": 0.5 * late(step)},
    "Importance ratio": lambda step, row: row | {"train/is_ratio": 1 + 0.6 * late(step)},
    "Length without accuracy": lambda step, row: stuck(row) | {"rollout/response_length": 10 + 10 * late(step)},
    "Groups without spread": lambda step, row: stuck(row) | {"rollout/zero_std_groups": min(0.95, 0.3 + late(step))},
    "Truncated answers": lambda step, row: row | {"rollout/truncated_fraction": 0.9 * min(1.0, 0.3 + late(step))},
    "Engine-trainer gap": lambda step, row: row | {"train/train_rollout_logprob_abs_diff": 0.01 + 0.4 * late(step)},
    "Gradient spikes": lambda step, row: row | ({"train/grad_norm": 90.0} if step == STEPS - 3 else {}),
    "Flat reward": lambda step, row: stuck(row),
}


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_rule_fires_on_its_seeded_run_alone(tmp_path: Path, rule: str) -> None:
    rows = [BAD[rule](step, row) for step, row in enumerate(healthy(), 1)]
    assert fired(tmp_path, rows) == [*dict.fromkeys([rule, *["Flat reward"] * (rows == [*map(stuck, rows)])])]


def test_an_infinite_gradient_norm_fires(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(
        "".join(f'{{"step": {i}, "train/grad_norm": {"Infinity" if i == 24 else 1.0}}}\n' for i in range(25))
    )
    assert fired(tmp_path, []) == ["Gradient spikes"]


def test_held_out_accuracy_excuses_length(tmp_path: Path) -> None:
    rows = [BAD["Length without accuracy"](step, row) for step, row in enumerate(healthy(), 1)]
    rows[0]["eval/heldout/accuracy"], rows[-1]["eval/heldout/accuracy"] = 0.2, 0.6
    assert fired(tmp_path, rows) == []


def test_reward_without_held_out_accuracy_does_not_excuse_length(tmp_path: Path) -> None:
    rows = [row | {"rollout/response_length": 10.0 + step} for step, row in enumerate(healthy(), 1)]
    rows[0]["eval/heldout/accuracy"] = rows[-1]["eval/heldout/accuracy"] = 0.2
    assert fired(tmp_path, rows) == ["Length without accuracy"]


@pytest.mark.parametrize("place", ["rollout/reward_parts/", "eval/heldout/reward_parts/"])
def test_a_reward_that_pays_for_length_does_not_excuse_it(tmp_path: Path, place: str) -> None:
    """The whole reward grows; the part that states whether an answer is right does not."""
    rows = [
        row | {"rollout/response_length": 10.0 + step, "rollout/reward": step} for step, row in enumerate(healthy())
    ]
    for step, row in enumerate(rows):
        row |= {f"{place}math": 0.2, f"{place}length": 10.0 + step, "eval/heldout/accuracy": float(step)}
    if place.startswith("rollout/"):
        rows = [{name: value for name, value in row.items() if not name.startswith("eval/")} for row in rows]
    assert fired(tmp_path, rows) == ["Length without accuracy"]


def test_a_part_that_grows_excuses_length(tmp_path: Path) -> None:
    rows = [row | {"rollout/response_length": 10.0 + step, "rollout/reward": 0.2} for step, row in enumerate(healthy())]
    assert fired(tmp_path, [row | {"rollout/reward_parts/math": step / 40} for step, row in enumerate(rows)]) == []


def test_truncation_that_training_removes_is_no_fault(tmp_path: Path) -> None:
    rows = [row | {"rollout/truncated_fraction": 0.9 - 0.3 * step / STEPS} for step, row in enumerate(healthy(), 1)]
    assert fired(tmp_path, rows) == []


def test_a_short_run_has_no_verdict(tmp_path: Path) -> None:
    write_rows(tmp_path, [(step, {"train/grad_norm": 1000.0**step}) for step in range(2 * WINDOW - 1)])
    metrics = MetricsFile(tmp_path / METRICS)
    metrics.refresh()
    assert {verdict.state for verdict in verdicts(metrics, {})} == {"no data"}


def test_every_rule_names_a_flag_that_exists() -> None:
    flags = flags_reference()
    assert not [advice.flag for rule in RULES for advice in rule.advice if f"`{advice.flag}`" not in flags]
