"""The comparison of a sweep: sweep.html, on the page of a run, and a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.base.flags import count
from miles.commands.sweeps.definition import PAGE
from miles.commands.sweeps.results import AREA, FINAL, MEAN_OF_LAST, Results, Row
from miles.commands.sweeps.statistics import Interval, band
from miles.commands.sweeps.swept_run import Start, SweptRun
from miles.observe.report.figures import charts, number
from miles.observe.report.metrics_file import MetricsFile
from miles.observe.report.page import single_file

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
    specs = []
    for chart in charts(names):
        labelled = len(chart["series"]) > 1
        series = [
            {**_keys(place, one["key"]), "label": f"{variant} {one['label']}" if labelled else variant}
            for one in chart["series"]
            for place, variant in enumerate(results.variants)
            if _keys(place, one["key"])["key"] in columns
        ]
        if series:
            specs.append(chart | {"section": "learning", "series": series})
    words = (
        f"Lines are means over the seeds, bands their 95 % bootstrap intervals at each step. Differences are from "
        f"{results.definition.baseline}, at the same seed."
    )
    overview = {
        "revision": "",
        "title": _title(results),
        "words": words,
        "steps": None,
        "tiles": _tiles(results),
        "charts": specs,
        "tables": _tables(results),
    }
    return {"overview": overview, "metrics": {"steps": steps, "values": columns, "exact": True}}


def _title(results: Results) -> str:
    return f"sweep: {results.definition.path.stem}"


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
                columns[keys[key]] = [_or_none(value) for value in bound]
    return steps, columns


def _in_parts(file: MetricsFile, name: str, ends: Sequence[int]) -> NDArray[np.float64]:
    """Return the mean of a metric in each stretch of steps up to ``ends``; NaN without a finite value."""
    values = np.array(file.column(name), dtype=np.float64)
    finite = np.isfinite(values)
    places = np.searchsorted(ends, np.array(file.steps))[finite]
    counts = np.bincount(places, minlength=len(ends))
    sums = np.bincount(places, weights=values[finite], minlength=len(ends))
    means = np.full(len(ends), math.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def _tables(results: Results) -> list[dict[str, Any]]:
    rows, last = results.rows(), results.definition.last
    columns = [
        "metric",
        "variant",
        "final value",
        f"mean of the last {last}",
        "area under the curve, per step",
        "seeds",
    ]
    differences = [row for row in rows if row.difference is not None]
    baseline = results.definition.baseline
    means = [
        [metric, variant, *(shown(group[name].mean) for name in (FINAL, MEAN_OF_LAST, AREA)), _seeds(group)]
        for (metric, variant), group in _grouped(rows)
    ]
    changes = [
        [
            metric,
            variant,
            *(shown(_difference(group[name])) for name in (FINAL, MEAN_OF_LAST, AREA)),
            _seeds(group, True),
        ]
        for (metric, variant), group in _grouped(differences)
    ]
    settings = [[name, *values] for name, values in results.settings()]
    return [
        _table(f"Difference from {baseline}, at the same seed", columns, changes, "There is one variant."),
        _table("Means over the seeds", columns, means, "No run is finished."),
        _table("Settings that differ", ["setting", *results.variants], settings, "No setting differs."),
        _table("Runs", ["run", "state", "attempts", "seconds"], [_run(results, run) for run in results.runs], ""),
    ]


def _grouped(rows: Sequence[Row]) -> list[tuple[tuple[str, str], dict[str, Row]]]:
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.metric, row.variant), {})[row.summary] = row
    return list(groups.items())


def _difference(row: Row) -> Interval:
    assert row.difference is not None, "rows of the baseline are left out"
    return row.difference


def _seeds(group: dict[str, Row], paired: bool = False) -> str:
    return str(max((_difference(row) if paired else row.mean).count for row in group.values()))


def _run(results: Results, run: SweptRun) -> list[str]:
    start, attempts = results.starts[run.name], run.attempts
    state = "finished"
    if start is not Start.FINISHED:
        state = "not started" if not attempts else f"not finished: {attempts[-1].last_line}"
    return [run.name, state, str(len(attempts)), number(sum(attempt.seconds for attempt in attempts))]


def _table(title: str, columns: list[str], rows: list[list[str]], empty: str) -> dict[str, Any]:
    return {"title": title, "columns": columns, "rows": rows, "note": "" if rows else empty}


def shown(interval: Interval) -> str:
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
    cells = [head + [f"difference from {results.definition.baseline}"] * compares]
    for row in rows:
        difference = "" if row.difference is None else shown(row.difference)
        cells.append([row.metric, row.variant, shown(row.mean), str(row.mean.count)] + [difference] * compares)
    widths = [max(len(line[place]) for line in cells) for place in range(len(cells[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )


def _or_none(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
