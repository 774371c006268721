"""Choose the curves of the page and the figures at its head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from miles.observe.report.metrics_file import MetricsFile

# Metric, title, what the reader should know. They come first, in this order, if the run has them.
_LEARNING = (
    ("rollout/reward", "Reward", "mean of the iteration"),
    ("rollout/response_length", "Response length", "tokens, mean of the iteration"),
    ("rollout/truncated_fraction", "Truncated answers", "share of the iteration"),
    ("rollout/zero_std_groups", "Groups without spread", "share whose answers all have one reward"),
    ("train/pg_loss", "Policy loss", "aggregated as the objective says"),
    ("train/value_loss", "Value loss", "of the critic"),
    ("train/explained_variance", "Explained variance", "of the returns, by the critic"),
    ("train/entropy_loss", "Entropy", "nats per token"),
    ("train/pg_clipfrac", "Clip fraction", "share of tokens clipped"),
    ("train/ppo_kl", "KL of the update", "to the sampling policy"),
    ("train/kl_loss", "KL to the start", "to the reference model"),
    ("train/train_rollout_logprob_abs_diff", "Engine-trainer gap", "nats per token, absolute"),
    ("train/ess_ratio", "Effective sample size", "share of the samples"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/lr", "Learning rate", ""),
)
_ENGINE = (
    ("perf/tokens_per_second", "Throughput", "tokens per second"),
    ("perf/engine_busy", "Engine utilization", "share of the time with requests"),
    ("perf/engine_responses", "Responses in flight", "mean while the engine has requests"),
    ("perf/trainer_memory_gib", "Memory of the trainer", "GiB, of the fullest rank"),
    ("perf/trainer_memory_foreseen_gib", "Memory of the trainer, foreseen", "GiB, by a rehearsal"),
    ("perf/rollout_memory_gib", "Memory of the rollout process", "GiB"),
    ("rollout/staleness", "Staleness", "weight versions behind, mean over tokens"),
    ("rollout/staleness_max", "Greatest staleness", "weight versions behind"),
    ("rollout/mixed_version_samples", "Mixed weight versions", "share of samples"),
)
_ENGINE_PREFIXES = ("perf/", "engine/", "memory/", "weight_sync/", "rollout/staleness")
_MAY_BE_NEGATIVE = ("train/pg_loss", "train/loss")

Chart = dict[str, Any]


def evaluation_names(names: Iterable[str]) -> list[str]:
    """Return the metrics of held-out accuracy, one per evaluation set."""
    return sorted(name for name in names if name.startswith("eval/") and name.endswith("/accuracy"))


def set_name(accuracy: str) -> str:
    """Return the name of the evaluation set that a metric of ``evaluation_names`` is of."""
    return accuracy.removeprefix("eval/").removesuffix("/accuracy")


def _chart(section: str, title: str, note: str, names: Sequence[str], labels: Sequence[str]) -> Chart:
    series = [{"key": name, "label": label} for name, label in zip(names, labels, strict=True)]
    return {
        "section": section,
        "title": title,
        "note": note,
        "series": series,
        "zero": names[0] not in _MAY_BE_NEGATIVE,
    }


def charts(names: Sequence[str]) -> list[Chart]:
    """Return the charts of the metrics ``names``, the usual ones first; the seconds by phase are apart."""
    held_out = evaluation_names(names)
    charts: list[Chart] = []
    if held_out:
        sets = list(map(set_name, held_out))
        charts.append(_chart("learning", "Held-out accuracy", "evaluation sets", held_out, sets))
    charts += [_chart("learning", title, note, [n], [n]) for n, title, note in _LEARNING if n in names]
    charts += [_chart("engine", title, note, [n], [n]) for n, title, note in _ENGINE if n in names]
    shown = {series["key"] for chart in charts for series in chart["series"]}
    for name in names:
        if name not in shown and not name.startswith("time/"):
            section = "engine" if name.startswith(_ENGINE_PREFIXES) else "more"
            charts.append(_chart(section, name, "", [name], [name]))
    return charts


def number(value: float) -> str:
    """Return a value as people read it: four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def tiles(metrics: MetricsFile) -> list[dict[str, str]]:
    """Return the figures that summarize a run: label, value, remark."""
    done = metrics.steps[-1] if metrics.steps else 0  # rows of a long run may be thinned; that of step 0 is no step
    tiles = [_tile("steps", str(done), "")]
    sets = [(name, f"held-out {set_name(name)}") for name in evaluation_names(metrics.names)]
    for name, label in [("rollout/reward", "reward"), *sets]:
        values = [v for v in metrics.column(name) if math.isfinite(v)]
        if values:
            remark = f"from {number(values[0])}, best {number(max(values))}"
            tiles.append(_tile(label, number(values[-1]), remark))
    seconds = [v for v in metrics.column("time/step") if math.isfinite(v)]
    if seconds:
        total = sum(seconds)
        tiles.append(_tile("wall time", _duration(total), f"{number(total / len(seconds))} s per iteration"))
    return tiles


def _tile(label: str, value: str, remark: str) -> dict[str, str]:
    return {"label": label, "value": value, "remark": remark}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
