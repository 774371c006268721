"""The figures of a sweep: one number per run, metric and summary, and what they say about the variants."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.commands.sweeps import statistics
from miles.commands.sweeps.definition import TABLE_CSV, TABLE_JSON, Definition
from miles.commands.sweeps.statistics import Interval
from miles.commands.sweeps.swept_run import Start, SweptRun
from miles.observe.report.comparison import differing_settings
from miles.observe.report.figures import evaluation_names
from miles.observe.report.metrics_file import MetricsFile
from miles.observe.tracking.run_files import METRICS
from miles.observe.tracking.run_header import RunHeader
from miles.rollout.intervals import CONFIDENCE

USUAL = (
    "rollout/reward",
    "rollout/response_length",
    "rollout/zero_std_groups",
    "train/entropy_loss",
    "train/pg_clipfrac",
    "train/grad_norm",
    "time/step",
)
FINAL, MEAN_OF_LAST, AREA = "final", "mean_of_last", "area"
SUMMARIES = (FINAL, MEAN_OF_LAST, AREA)
_OF_THE_RUN = {
    ("tracking", "output_dir"),
    ("checkpoint", "save"),
    ("checkpoint", "save_hf"),
    ("training", "seed"),
    ("data", "rollout_seed"),
}


@dataclass(frozen=True)
class Row:
    """A metric, summarized for each run of a variant.

    Attributes:
        metric: The metric.
        summary: One of ``SUMMARIES``.
        variant: The variant.
        values: One value per seed of a finished run; NaN if the run lacks the metric.
        mean: Their mean over seeds.
        difference: The mean of their differences from the baseline's at the same seed; None for the baseline itself.
    """

    metric: str
    summary: str
    variant: str
    values: dict[int, float]
    mean: Interval
    difference: Interval | None


class Results:
    """The finished runs of a sweep."""

    def __init__(self, definition: Definition, runs: Sequence[SweptRun]) -> None:
        self.definition = definition
        self.runs = runs
        self.variants = [variant.name for variant in definition.variants]
        self.starts = {run.name: run.start for run in runs}
        self._metrics: dict[str, dict[int, MetricsFile]] = {name: {} for name in self.variants}
        for run in runs:
            if self.starts[run.name] is Start.FINISHED:
                file = MetricsFile(run.folder / METRICS)
                file.refresh()
                self._metrics[run.planned.variant][run.planned.seed] = file

    @property
    def finished(self) -> int:
        """The number of finished runs."""
        return sum(map(len, self._metrics.values()))

    @property
    def names(self) -> list[str]:
        """The metrics that a finished run has, sorted."""
        return sorted({name for files in self._metrics.values() for file in files.values() for name in file.names})

    @property
    def table_metrics(self) -> list[str]:
        """The metrics of the table that a run has, in order."""
        known = {*self.names}
        wanted = self.definition.metrics or (*evaluation_names(known), *USUAL)
        return [name for name in wanted if name in known]

    @property
    def missing_metrics(self) -> list[str]:
        """The metrics that the file names and no finished run has."""
        known = {*self.names}
        return [name for name in self.definition.metrics or () if name not in known]

    def files(self, variant: str) -> dict[int, MetricsFile]:
        """Return the metrics of a variant's finished runs by seed."""
        return dict(sorted(self._metrics[variant].items()))

    def rows(self) -> list[Row]:
        """Return the table: every metric, summary and variant."""
        rows = []
        for metric in self.table_metrics:
            for summary in SUMMARIES:
                values = {variant: self._values(variant, metric, summary) for variant in self.variants}
                baseline = values[self.definition.baseline]
                for variant in self.variants:
                    difference = None
                    if variant != self.definition.baseline:
                        difference = statistics.paired_difference(values[variant], baseline)
                    mean = statistics.over_seeds(values[variant])
                    rows.append(Row(metric, summary, variant, values[variant], mean, difference))
        return rows

    def _values(self, variant: str, metric: str, summary: str) -> dict[int, float]:
        return {seed: self._summarized(file, metric, summary) for seed, file in self.files(variant).items()}

    def _summarized(self, file: MetricsFile, metric: str, summary: str) -> float:
        column = file.column(metric)
        match summary:
            case "final":
                return statistics.final(column)
            case "mean_of_last":
                return statistics.mean_of_last(column, self.definition.last)
            case "area":
                return statistics.area(file.steps, column)
        raise AssertionError(f"{summary} is none of {SUMMARIES}")

    def settings(self) -> list[tuple[str, list[str]]]:
        """Return the settings that differ between variants: ``section.name`` and the value of each variant."""
        first = {run.planned.variant: run.planned.settings for run in reversed(self.runs)}
        headers = [RunHeader.from_sections("", first[variant], "", "", 0) for variant in self.variants]
        found = differing_settings([header.public_settings() for header in headers], _OF_THE_RUN)
        offsets = [str(variant.seed_offset) for variant in self.definition.variants]
        return [*found, ("seed_offset", offsets)] if len({*offsets}) > 1 else found


def write_tables(results: Results, out: Path) -> None:
    """Write table.json, with the value of every run, and table.csv, with means, intervals and differences."""
    rows, definition = results.rows(), results.definition
    whole = {
        "baseline": definition.baseline,
        "seeds": list(definition.seeds),
        "last": definition.last,
        "confidence": CONFIDENCE,
        "rows": [_as_json(row) for row in rows],
        "settings": {name: dict(zip(results.variants, values, strict=True)) for name, values in results.settings()},
        "runs": [
            {
                "variant": run.planned.variant,
                "seed": run.planned.seed,
                "is_finished": results.starts[run.name] is Start.FINISHED,
                "attempts": len(run.attempts),
                "seconds": round(sum(attempt.seconds for attempt in run.attempts), 1),
            }
            for run in results.runs
        ],
    }
    text = json.dumps(whole, indent=1, allow_nan=False, ensure_ascii=False)
    (out / TABLE_JSON).write_text(text + "\n", encoding="utf-8")
    columns = ["metric", "summary", "variant", *_bounds("", None), "baseline", *_bounds("difference_", None)]
    with (out / TABLE_CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            values = {"metric": row.metric, "summary": row.summary, "variant": row.variant, **_bounds("", row.mean)}
            if row.difference is not None:
                values |= {"baseline": definition.baseline, **_bounds("difference_", row.difference)}
            writer.writerow(values)


def _bounds(prefix: str, interval: Interval | None) -> dict[str, Any]:
    values = (
        ("", "", "", "")
        if interval is None
        else (*(_text(v) for v in (interval.mean, interval.low, interval.high)), interval.count)
    )
    return {f"{prefix}{name}": value for name, value in zip(("mean", "low", "high", "count"), values, strict=True)}


def _text(value: float) -> str:
    return f"{value:.8g}" if math.isfinite(value) else ""


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "metric": row.metric,
        "summary": row.summary,
        "variant": row.variant,
        "values": {str(seed): _or_none(value) for seed, value in row.values.items()},
        "mean": _interval_json(row.mean),
        "difference": None if row.difference is None else _interval_json(row.difference),
    }


def _interval_json(interval: Interval) -> dict[str, Any]:
    return {name: _or_none(value) if name != "count" else value for name, value in vars(interval).items()}


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
