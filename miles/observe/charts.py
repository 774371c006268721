"""Choose the charts of a run's page: which metrics it shows, by question, under which name and unit."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Any

from miles.objective.loss_types import LOSS_TYPES
from miles.objective.settings import LossArguments
from miles.observe.metrics_file import MetricsFile
from miles.types.metrics import held_out_metrics

QUESTIONS = {
    "learning": "Is it learning?",
    "stability": "Is it stable?",
    "engine": "What does generation do?",
    "time": "Where does the time go?",
}
SHARE = "share"  # the unit of values between 0 and 1
NOTHING = 1e-6  # a metric that stays below this is zero: a mean of float32 token losses has errors of this size
_CHARTS: dict[str, list[list[str]]] = tomllib.loads((files(__package__) / "charts.toml").read_text(encoding="utf-8"))
_ENGINE_PREFIXES = ("perf/", "engine/", "memory/", "weight_sync/", "rollout/staleness")
_BELOW_ZERO = ("train/pg_loss", "train/loss")

Chart = dict[str, Any]
Settings = Mapping[str, Mapping[str, Any]]  # section to field to value, as run.json has them


def evaluation_names(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out reward, one per evaluation set."""
    return [*held_out_metrics(names).values()]


def _chart(question: str, title: str, unit: str, series: Mapping[str, str]) -> Chart:
    first = next(iter(series))
    return {
        "question": question,
        "title": title,
        "unit": unit,
        "series": [{"key": name, "label": label} for name, label in series.items()],
        "range": [0, 1] if unit == SHARE else None,
        "zero": first not in _BELOW_ZERO,
        "least": 0.0 if first == "train/lr" else NOTHING,
    }


def charts(names: Sequence[str], main: Sequence[str] = ()) -> list[Chart]:
    """Return the charts of the metrics ``names`` by question, the usual ones first; the seconds by phase are apart.

    Args:
        names: The metrics of a run, or of several.
        main: Metrics whose charts are the large ones at the top, in this order.
    """
    sets = {name: evaluation_set for evaluation_set, name in held_out_metrics(names).items()}
    result = [_chart("learning", "Held-out reward", "reward, mean of an evaluation set", sets)] if sets else []
    for question, rows in _CHARTS.items():
        result += [_chart(question, title, unit, {name: name}) for name, title, unit in rows if name in names]
    keys = {series["key"] for chart in result for series in chart["series"]}
    for name in names:
        if name not in keys and not name.startswith("time/"):
            question = "engine" if name.startswith(_ENGINE_PREFIXES) else "learning"
            if name.startswith("train/"):
                question = "stability"
            unit = SHARE if name.endswith(("_fraction", "_frac", "clipfrac")) else ""
            result.append(_chart(question, name, unit, {name: name}))
    large = {name: place for place, name in enumerate(main)}
    for chart in result:
        first = chart["series"][0]["key"]
        if first in large:
            chart.update(question="main", place=large[first])
    return sorted(result, key=lambda chart: chart.get("place", len(large)))


def run_charts(metrics: MetricsFile, settings: Settings) -> list[Chart]:
    """Return the charts of one run; charts of metrics that are zero throughout are marked ``"is_zero"``."""
    result = charts(metrics.names, main_metrics(metrics.names, settings))
    for chart in result:
        chart["is_zero"] = all(metrics.is_zero(series["key"], chart["least"]) for series in chart["series"])
    return result


def main_metrics(names: Sequence[str], settings: Settings) -> list[str]:
    """Return the two metrics that say most about whether a run learns."""
    held_out = evaluation_names(names)[:1]
    if not learns_from_rewards(settings):
        wanted = [*held_out_losses(names)[:1], "train/loss", *held_out, "train/grad_norm"]
    else:
        wanted = [*held_out, "rollout/reward", "rollout/response_length", "train/loss"]
    return [name for name in wanted if name in names][:2]


def held_out_losses(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out losses, one per evaluation set."""
    return sorted(name for name in names if name.startswith("eval/") and name.endswith("/loss"))


def loss_of(settings: Settings) -> LossArguments:
    """Return the settings of the objective, with defaults for settings that run.json lacks."""
    names = {field.name for field in dataclasses.fields(LossArguments)}
    return LossArguments(**{name: value for name, value in settings.get("loss", {}).items() if name in names})


def learns_from_rewards(settings: Settings) -> bool:
    """Return whether the loss uses advantages, as all but SFT's do."""
    return LOSS_TYPES[loss_of(settings).loss_type].uses_advantages


def number(value: float) -> str:
    """Return a value as people read it: four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def tiles(metrics: MetricsFile) -> list[dict[str, str]]:
    """Return the figures that summarize a run: label, value, remark."""
    tiles = []
    sets = {f"held-out {evaluation_set}": name for evaluation_set, name in held_out_metrics(metrics.names).items()}
    for label, name in {"reward": "rollout/reward", **sets}.items():
        values = [v for v in metrics.column(name) if math.isfinite(v)]
        if values:
            remark = f"from {number(values[0])}, best {number(max(values))}"
            tiles.append({"label": label, "value": number(values[-1]), "remark": remark})
    seconds = [v for v in metrics.column("time/step") if math.isfinite(v)]
    if seconds:
        remark = f"{number(fmean(seconds))} s per iteration"
        tiles.append({"label": "wall time", "value": _duration(sum(seconds)), "remark": remark})
    return tiles


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
