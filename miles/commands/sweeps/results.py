"""The figures of a sweep: one number per run, metric and summary, and what they say about the variants."""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.base.flags import count
from miles.commands.sweeps.definition import PAGE, TABLE_CSV, TABLE_JSON, Definition
from miles.commands.sweeps.swept_run import RunStart, SweptRun
from miles.observe.charts import charts, evaluation_names, main_metrics, number
from miles.observe.metrics_file import MetricsFile, six_digits
from miles.observe.page import single_file
from miles.observe.report.comparison import charts_of_several, differing_settings, overview_of_several, page_table
from miles.observe.run_files import METRICS, RunHeader, finite
from miles.rollout.intervals import CONFIDENCE, bootstrap

# The statistics of a comparison: one figure per run, and means over seeds with intervals.
#
# Runs of two variants with one seed begin with the same weights and prompts, so the comparison is of their difference,
# seed by seed. Intervals are 95 % percentile bootstrap intervals of a mean (Efron 1979), over seeds. Few seeds make
# them too narrow: of 8 draws from a normal distribution they cover the mean in about 90 % of the cases, of 4 in about
# 80 %.


FEWEST = 2  # values that an interval needs
BAND_RESAMPLES = 1000


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; bounds of NaN: there are too few values.

    Attributes:
        mean: The mean.
        low: The lower bound.
        high: The upper bound.
        count: How many values it is of.
    """

    mean: float
    low: float
    high: float
    count: int


def mean_of_last(values: Sequence[float], count: int) -> float:
    """Return the mean of the last ``count`` finite values, or of all if there are fewer; NaN without one."""
    finite = [value for value in values if math.isfinite(value)][-count:]
    return math.fsum(finite) / len(finite) if finite else math.nan


def area(steps: Sequence[float], values: Sequence[float]) -> float:
    """Return the area under the curve through all finite values, over the steps that it spans: its mean height.

    The curve is linear between measurements (trapezoidal rule). One value is its own height; NaN without one.
    """
    points = [(float(step), float(value)) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(points) < 2:
        return points[0][1] if points else math.nan
    pairs = list(zip(points, points[1:], strict=False))
    return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / (points[-1][0] - points[0][0])


def over_seeds(values: Mapping[int, float]) -> Interval:
    """Return the mean of one value per seed. Seeds without a finite value are left out."""
    finite = [values[seed] for seed in sorted(values) if math.isfinite(values[seed])]
    if not finite:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(finite) / len(finite)
    if len(finite) < FEWEST:
        return Interval(mean, math.nan, math.nan, len(finite))
    return Interval(mean, *bootstrap(finite), len(finite))


def paired_difference(values: Mapping[int, float], baseline: Mapping[int, float]) -> Interval:
    """Return the mean of ``values`` less ``baseline`` over the seeds that both have a finite value of."""
    return over_seeds({seed: values[seed] - baseline[seed] for seed in values.keys() & baseline.keys()})


def band(curves: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return mean, lower and upper bound of curves at each step; bounds of NaN where fewer than two have a value.

    The bounds hold for each step alone: a band does not hold whole curves with 95 %.

    Args:
        curves: (seeds, steps); NaN if a run has no value there.
    """
    there = np.isfinite(curves)
    filled = np.where(there, curves, 0.0)
    counts = there.sum(axis=0)
    mean = _divided(filled.sum(axis=0), counts)
    random = np.random.default_rng(0)
    draws = random.multinomial(len(curves), np.full(len(curves), 1 / len(curves)), size=BAND_RESAMPLES).astype(float)
    means = _divided(draws @ filled, draws @ there)  # a draw of seeds that all lack the step has none
    low, high = np.full_like(mean, math.nan), np.full_like(mean, math.nan)
    enough = counts >= FEWEST
    if enough.any():
        tail = (1 - CONFIDENCE) / 2
        low[enough], high[enough] = np.nanquantile(means[:, enough], [tail, 1 - tail], axis=0)
    return mean, low, high


def _divided(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    quotients = np.full(np.shape(sums), math.nan)
    np.divide(sums, counts, out=quotients, where=counts > 0)
    return quotients


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
_SUMMARIZED: Mapping[str, Callable[[MetricsFile, str, int], float]] = {
    FINAL: lambda file, name, last: mean_of_last(file.column(name), 1),
    MEAN_OF_LAST: lambda file, name, last: mean_of_last(file.column(name), last),
    AREA: lambda file, name, last: area(file.steps, file.column(name)),
}
_OF_THE_RUN = {
    ("tracking", "output_dir"),
    ("checkpoint", "save"),
    ("checkpoint", "save_hf"),
    ("training", "seed"),
    ("data", "rollout_seed"),
}


@dataclass(frozen=True)
class MetricSummary:
    """A metric, summarized for each run of a variant.

    Attributes:
        metric: The metric.
        summary: ``FINAL``, ``MEAN_OF_LAST`` or ``AREA``.
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
            if self.starts[run.name] is RunStart.FINISHED:
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

    def rows(self) -> list[MetricSummary]:
        """Return the table: every metric, summary and variant."""
        rows = []
        for metric in self.table_metrics:
            for summary in _SUMMARIZED:
                values = {variant: self._values(variant, metric, summary) for variant in self.variants}
                baseline = values[self.definition.baseline]
                for variant in self.variants:
                    difference = None
                    if variant != self.definition.baseline:
                        difference = paired_difference(values[variant], baseline)
                    mean = over_seeds(values[variant])
                    rows.append(MetricSummary(metric, summary, variant, values[variant], mean, difference))
        return rows

    def _values(self, variant: str, metric: str, summary: str) -> dict[int, float]:
        last = self.definition.last
        return {seed: _SUMMARIZED[summary](file, metric, last) for seed, file in self.files(variant).items()}

    def settings(self) -> list[tuple[str, list[str]]]:
        """Return the settings that differ between variants: ``section.name`` and the value of each variant."""
        first = {run.planned.variant: run.planned.settings for run in reversed(self.runs)}
        headers = [RunHeader.from_sections("", first[variant], "", "", 0) for variant in self.variants]
        differences = differing_settings([header.public_settings() for header in headers], _OF_THE_RUN)
        offsets = [str(variant.seed_offset) for variant in self.definition.variants]
        return [*differences, ("seed_offset", offsets)] if len({*offsets}) > 1 else differences


def write_tables(results: Results, out: Path) -> None:
    """Write table.json, with the value of every run, and table.csv, with means, intervals and differences."""
    rows, definition = results.rows(), results.definition
    whole = {
        "baseline": definition.baseline,
        "seeds": list(definition.seeds),
        "last": definition.last,
        "confidence": CONFIDENCE,
        "rows": [asdict(row) for row in rows],
        "settings": {name: dict(zip(results.variants, values, strict=True)) for name, values in results.settings()},
        "runs": [
            {
                "variant": run.planned.variant,
                "seed": run.planned.seed,
                "is_finished": results.starts[run.name] is RunStart.FINISHED,
                "attempts": len(run.attempts),
                "seconds": round(sum(attempt.seconds for attempt in run.attempts), 1),
            }
            for run in results.runs
        ],
    }
    text = json.dumps(finite(whole), indent=1, allow_nan=False, ensure_ascii=False)
    (out / TABLE_JSON).write_text(text + "\n", encoding="utf-8")
    bounds = [field.name for field in fields(Interval)]
    columns = ["metric", "summary", "variant", *bounds, "baseline", *(f"difference_{bound}" for bound in bounds)]
    with (out / TABLE_CSV).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            values = {"metric": row.metric, "summary": row.summary, "variant": row.variant, **_cells("", row.mean)}
            if row.difference is not None:
                values |= {"baseline": definition.baseline, **_cells("difference_", row.difference)}
            writer.writerow(values)


def _cells(prefix: str, interval: Interval) -> dict[str, str]:
    bounds = vars(interval).items()
    return {f"{prefix}{name}": f"{value:.8g}" if math.isfinite(value) else "" for name, value in bounds}


# The comparison of a sweep: sweep.html, on the page of a run, and a table for the terminal.


MOST_POINTS = 300  # of a curve
_SEPARATOR = "\n"  # between variant, bound and metric


def write_page(results: Results, out: Path) -> Path:
    """Write sweep.html: learning curves with bands, and the tables; return its path."""
    path = out / PAGE
    path.write_bytes(single_file(_title(results), page_data(results)))
    return path


def page_data(results: Results) -> dict[str, Any]:
    """Return the data of the page, in the form of ``Comparison.page``."""
    names = results.names
    steps, columns = _curves(results, names)

    def keys(place: int, metric: str) -> dict[str, str]:
        of_variant = _keys(place, metric)
        return of_variant if of_variant["key"] in columns else {}

    specs = charts_of_several(charts(names, main_metrics(names, {})), results.variants, keys)
    words = (
        f"Lines are means over the seeds, bands their 95 % bootstrap intervals at each step. Differences are from "
        f"{results.definition.baseline}, at the same seed."
    )
    overview = overview_of_several(_title(results), _sentence(results), specs, _tables(results))
    overview |= {"words": words, "tiles": _tiles(results)}
    return {"overview": overview, "metrics": {"steps": steps, "values": columns, "exact": True}}


def _title(results: Results) -> str:
    return f"sweep: {results.definition.path.stem}"


def _sentence(results: Results) -> str:
    """Return the last values of the first metric of the table, of each variant."""
    rows = [row for row in results.rows() if row.summary == FINAL]
    means = ", ".join(f"{row.variant} {interval_text(row.mean)}" for row in rows if row.metric == rows[0].metric)
    return f"Last {rows[0].metric}: {means}." if rows else "No run is finished."


def _tiles(results: Results) -> list[dict[str, str]]:
    runs, seeds = len(results.runs), len(results.definition.seeds)
    remark = f"{count(len(results.variants), 'variant')} × {count(seeds, 'seed')}"
    tiles = [{"label": "finished runs", "value": f"{results.finished} of {runs}", "remark": remark}]
    seconds = [attempt.seconds for run in results.runs for attempt in run.attempts]
    if seconds:
        hours = f"{sum(seconds) / 3600:.2f} h"
        tiles.append({"label": "time of all runs", "value": hours, "remark": count(len(seconds), "attempt")})
    return tiles


def _keys(place: int, metric: str) -> dict[str, str]:
    names = {"key": "mean", "low": "low", "high": "high"}
    return {key: f"{place}{_SEPARATOR}{name}{_SEPARATOR}{metric}" for key, name in names.items()}


def _curves(results: Results, names: Sequence[str]) -> tuple[list[int], dict[str, list[float | None]]]:
    """Return the steps, and mean and bounds of every metric and variant by the keys of ``_keys``.

    If there are more than ``MOST_POINTS`` steps, a run's value is its mean over a stretch of them, at its last step.
    """
    files = [results.files(variant) for variant in results.variants]
    known = sorted({step for by_seed in files for file in by_seed.values() for step in file.steps})
    parts = np.array_split(np.array(known, dtype=np.int64), min(len(known), MOST_POINTS) or 1)
    steps = [int(part[-1]) for part in parts if len(part)]
    columns: dict[str, list[float | None]] = {}
    for place, by_seed in enumerate(files):
        for name in names:
            having = [file for file in by_seed.values() if name in file.names]
            if not having:
                continue
            values = np.array([_in_parts(file, name, steps) for file in having])
            keys = _keys(place, name)
            for key, bound in zip(("key", "low", "high"), band(values), strict=True):
                columns[keys[key]] = [six_digits(value) for value in bound]
    return steps, columns


def _in_parts(file: MetricsFile, name: str, ends: Sequence[int]) -> NDArray[np.float64]:
    """Return the mean of a metric in each stretch of steps up to ``ends``; NaN without a finite value."""
    values = np.array(file.column(name), dtype=np.float64)
    finite = np.isfinite(values)
    bins = np.searchsorted(ends, np.array(file.steps))[finite]
    counts = np.bincount(bins, minlength=len(ends))
    sums = np.bincount(bins, weights=values[finite], minlength=len(ends))
    return _divided(sums, counts)


def _tables(results: Results) -> list[dict[str, Any]]:
    rows = results.rows()
    last, baseline = results.definition.last, results.definition.baseline
    summaries = ["final value", f"mean of the last {last}", "area under the curve, per step"]
    columns = ["metric", "variant", *summaries, "seeds"]
    changes = _by_variant(rows, lambda row: row.difference)
    means = _by_variant(rows, lambda row: row.mean)
    settings = [[name, *values] for name, values in results.settings()]
    return [
        page_table(f"Difference from {baseline}, at the same seed", columns, changes, "There is one variant."),
        page_table("Means over the seeds", columns, means, "No run is finished."),
        page_table("Settings that differ", ["setting", *results.variants], settings, "No setting differs."),
        page_table("Runs", ["run", "state", "attempts", "seconds"], [_run(results, run) for run in results.runs]),
    ]


def _by_variant(
    rows: Sequence[MetricSummary], interval_of: Callable[[MetricSummary], Interval | None]
) -> list[list[str]]:
    """Return a row for each metric and variant with intervals: one per summary, and the number of seeds."""
    groups: dict[tuple[str, str], list[Interval]] = {}
    for row in rows:
        if (interval := interval_of(row)) is not None:
            groups.setdefault((row.metric, row.variant), []).append(interval)
    return [
        [*names, *map(interval_text, intervals), str(max(interval.count for interval in intervals))]
        for names, intervals in groups.items()
    ]


def _run(results: Results, run: SweptRun) -> list[str]:
    start, attempts = results.starts[run.name], run.attempts
    state = "finished"
    if start is not RunStart.FINISHED:
        state = "not started" if not attempts else f"not finished: {attempts[-1].last_line}"
    return [run.name, state, str(len(attempts)), number(sum(attempt.seconds for attempt in attempts))]


def interval_text(interval: Interval) -> str:
    """Return a mean with its interval as people read it: ``0.84 [0.81, 0.87]``; an en dash without a value."""
    if not math.isfinite(interval.mean):
        return "–"
    if not math.isfinite(interval.low):
        return number(interval.mean)
    return f"{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]"


def text_table(results: Results) -> str:
    """Return the means of the last values, and their differences from the baseline, for the terminal."""
    rows = [row for row in results.rows() if row.summary == MEAN_OF_LAST]
    if not rows:
        return "no run is finished"
    head = ["metric", "variant", f"mean of the last {results.definition.last}", "seeds"]
    compares = len(results.variants) > 1
    if compares:
        head.append(f"difference from {results.definition.baseline}")
    cells = [head]
    for row in rows:
        cells.append([row.metric, row.variant, interval_text(row.mean), str(row.mean.count)])
        if compares:
            cells[-1].append("" if row.difference is None else interval_text(row.difference))
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )
