"""Several runs compared: differing settings, the first step at which metrics differ, final values, and a page."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.base.flags import count
from miles.observe.charts import QUESTIONS, Chart, charts, evaluation_names, main_metrics, number
from miles.observe.metrics_file import MetricsFile
from miles.observe.page import MOST_POINTS, setting_text, single_file
from miles.observe.run_files import METRICS, RunHeader

_MEASURED = ("time/", "perf/", "weight_sync/", "memory/", "engine/")  # depend on the machine: they never agree
_OWN_PATHS = {("tracking", "output_dir")}
_FINAL = ("rollout/reward", "rollout/response_length", "train/entropy_loss", "train/grad_norm", "time/step")
_SEPARATOR = "\n"  # between the number of a run and the name of a metric


@dataclass(frozen=True)
class FirstDifference:
    """The first difference of a metric: the step, and the value of each run there (NaN: not measured)."""

    metric: str
    step: int
    values: list[float]


class Comparison:
    """Runs to compare, named by their folders.

    Args:
        folders: The ``--output-dir`` of each run.
        tolerance: Relative difference up to which two values are equal.

    Raises:
        ValueError: There are fewer than two folders, or one holds no run.
    """

    def __init__(self, folders: Sequence[Path], tolerance: float = 0.0) -> None:
        if len(folders) < 2:
            raise ValueError(f"a comparison needs two runs or more, and was given {len(folders)}")
        self.names = _names(folders)
        self.tolerance = tolerance
        self.headers = [RunHeader.load(folder) for folder in folders]
        self.metrics = [MetricsFile(folder / METRICS) for folder in folders]
        for metrics in self.metrics:
            metrics.refresh()

    def settings(self) -> list[tuple[str, list[str]]]:
        """Return the settings that differ: ``section.name`` and the value of each run ("–": it has none)."""
        return differing_settings([header.public_settings() for header in self.headers], _OWN_PATHS)

    def differences(self) -> list[FirstDifference]:
        """Return the first difference of each metric that differs, the earliest first.

        Only steps and metrics that all runs have are compared; figures of the machine (seconds, memory) are not.
        """
        common = set.intersection(*(set(metrics.names) for metrics in self.metrics))
        indices = [{step: i for i, step in enumerate(metrics.steps)} for metrics in self.metrics]
        steps = sorted(set.intersection(*(set(place) for place in indices)))
        differences = []
        for name in sorted(common):
            if name.startswith(_MEASURED):
                continue
            columns = [metrics.column(name) for metrics in self.metrics]
            for step in steps:
                values = [column[place[step]] for column, place in zip(columns, indices, strict=True)]
                if not self._equal(values):
                    differences.append(FirstDifference(name, step, values))
                    break
        return sorted(differences, key=lambda difference: (difference.step, difference.metric))

    def _equal(self, values: Sequence[float]) -> bool:
        first = values[0]
        if math.isnan(first):
            return all(math.isnan(value) for value in values)
        return all(value == first or math.isclose(value, first, rel_tol=self.tolerance) for value in values[1:])

    def final_values(self) -> list[tuple[str, list[str]]]:
        """Return the newest value of the usual metrics in each run."""
        names = [n for metrics in self.metrics for n in (*_FINAL, *evaluation_names(metrics.names))]
        rows = [(name, [_newest(metrics, name) for metrics in self.metrics]) for name in dict.fromkeys(names)]
        steps = ("steps", [str(metrics.steps[-1]) if metrics.steps else "–" for metrics in self.metrics])
        return [steps, *(row for row in rows if set(row[1]) != {"–"})]

    def text(self) -> str:
        """Return the comparison for the terminal."""
        blocks = [_table("newest values", self.names, self.final_values())]
        settings = self.settings()
        blocks.append(_table("settings that differ", self.names, settings) if settings else "no setting differs")
        differences = self.differences()
        if differences:
            step = differences[0].step
            rows = [(d.metric, [number(v) for v in d.values]) for d in differences if d.step == step]
            blocks.append(_table(f"first difference: step {step}", self.names, rows))
        else:
            blocks.append("no metric differs in the steps that all runs have")
        return "\n\n".join(blocks)

    def page(self) -> bytes:
        """Return the comparison as one HTML file: curves over each other, and the tables."""
        all_names = sorted({name for metrics in self.metrics for name in metrics.names})
        title = " / ".join(self.names)
        specs = charts_of_several(
            charts(all_names, main_metrics(all_names, self.headers[0].settings)),
            self.names,
            lambda run, name: {"key": f"{run}{_SEPARATOR}{name}"} if name in self.metrics[run].names else {},
        )
        for chart in specs:
            keys = (series["key"].split(_SEPARATOR, 1) for series in chart["series"])
            chart["is_zero"] = all(self.metrics[int(run)].is_zero(name, chart["least"]) for run, name in keys)
        overview = overview_of_several(title, self._sentence(all_names), specs, self._tables())
        return single_file(title, {"overview": overview, "metrics": self._points(all_names)})

    def _sentence(self, names: Sequence[str]) -> str:
        """Return the newest value of the main metric in each run, and the differences, in one sentence."""
        parts = []
        for main in main_metrics(names, self.headers[0].settings)[:1]:
            label = "held-out reward" if main.startswith("eval/") else main.rpartition("/")[2]
            newest = [f"{run} {_newest(metrics, main)}" for run, metrics in zip(self.names, self.metrics, strict=True)]
            parts.append(f"{label}: {', '.join(newest)}")
        settings = self.settings()
        parts.append(f"{count(len(settings), 'setting')} differ" if settings else "no setting differs")
        differences = self.differences()
        parts.append(f"metrics differ from step {differences[0].step} on" if differences else "no metric differs")
        sentence = "; ".join(parts)
        return f"{sentence[0].upper()}{sentence[1:]}."

    def _points(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the points of all runs over the steps of any of them."""
        answers = [metrics.points(names, None, None, MOST_POINTS) for metrics in self.metrics]
        steps = sorted({step for answer in answers for step in answer["steps"]})
        values: dict[str, list[float | None]] = {}
        for run, answer in enumerate(answers):
            place = {step: i for i, step in enumerate(answer["steps"])}
            for name, column in answer["values"].items():
                values[f"{run}{_SEPARATOR}{name}"] = [column[place[s]] if s in place else None for s in steps]
        last = {
            f"{run}{_SEPARATOR}{name}": value
            for run, answer in enumerate(answers)
            for name, value in answer.get("last", {}).items()
        }
        return {"steps": steps, "values": values, "exact": all(answer["exact"] for answer in answers), "last": last}

    def _tables(self) -> list[dict[str, Any]]:
        values = [[name, *row] for name, row in self.final_values()]
        settings = [[name, *row] for name, row in self.settings()]
        differences = [[d.metric, str(d.step), *map(number, d.values)] for d in self.differences()]
        none = "None, in the steps that all runs have."
        return [
            page_table("Newest values", ["metric", *self.names], values),
            page_table("Settings that differ", ["setting", *self.names], settings, "No setting differs."),
            page_table("First step at which metrics differ", ["metric", "step", *self.names], differences, none),
        ]


# The page of several runs, or of several variants of a run: the page of a run, whose charts have a curve of each.


def overview_of_several(
    title: str, sentence: str, specs: Sequence[Chart], tables: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return what the page shows at once, as ``RunView.overview`` does for one run."""
    answer = {"is_learning": None, "sentence": sentence}
    fixed: dict[str, Any] = {"revision": "", "steps": None, "tiles": [], "questions": QUESTIONS}
    return {**fixed, "title": title, "answer": answer, "charts": specs, "tables": tables}


def charts_of_several(
    specs: Iterable[Chart], names: Sequence[str], keys: Callable[[int, str], Mapping[str, str]]
) -> list[Chart]:
    """Return charts with a curve of each run, without those that no run has.

    Args:
        specs: The charts of one run.
        names: The runs as people read them.
        keys: Returns the keys of a metric's curve by the number of the run; none if the run lacks the metric.
    """
    result = []
    for chart in specs:
        labelled = len(chart["series"]) > 1
        series = [
            {**of_run, "label": f"{name} {one['label']}" if labelled else name}
            for one in chart["series"]
            for number, name in enumerate(names)
            if (of_run := keys(number, one["key"]))
        ]
        if series:
            result.append(chart | {"series": series})
    return result


def page_table(title: str, columns: list[str], rows: list[list[str]], empty: str = "") -> dict[str, Any]:
    """Return a table of the page; ``empty`` is shown instead if it has no rows."""
    return {"title": title, "columns": columns, "rows": rows, "note": "" if rows else empty}


def differing_settings(
    runs: Sequence[Mapping[str, Mapping[str, Any]]], left_out: Collection[tuple[str, str]]
) -> list[tuple[str, list[str]]]:
    """Return the settings that differ: ``section.name`` and the value of each run ("–": it has none).

    Args:
        runs: Section to field to value, of each run.
        left_out: Sections and fields that always differ.
    """
    known = dict.fromkeys((s, name) for settings in runs for s, fields in settings.items() for name in fields)
    differences = []
    for section, name in known:
        values = [setting_text(settings.get(section, {}).get(name)) for settings in runs]
        if len(set(values)) > 1 and (section, name) not in left_out:
            differences.append((f"{section}.{name}", values))
    return differences


def _names(folders: Sequence[Path]) -> list[str]:
    """Return the name of each folder; the whole path where two are equal."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _newest(metrics: MetricsFile, name: str) -> str:
    return next((number(value) for value in reversed(metrics.column(name)) if math.isfinite(value)), "–")


def _table(title: str, columns: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> str:
    cells = [("", list(columns)), *rows]
    first = max(len(name) for name, _ in cells)
    widths = [max(len(values[i]) for _, values in cells) for i in range(len(columns))]
    lines = [
        "  ".join([f"  {name:{first}}", *(f"{v:>{w}}" for v, w in zip(values, widths, strict=True))]).rstrip()
        for name, values in cells
    ]
    return "\n".join([title, *lines])
