"""Which curves the report shows, read from the rows of metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from miles.tracking.charts import Series, line_chart, number, stacked_chart

Row = Mapping[str, float]

# Metric, title, what the reader should know.
_SINGLE = (
    ("rollout/response_length", "Response length", "tokens, mean of the rollout"),
    ("rollout/truncated_fraction", "Truncated answers", "share of the rollout"),
    ("train/pg_loss", "Policy loss", "aggregated as the objective says"),
    ("train/value_loss", "Value loss", "of the critic"),
    ("train/explained_variance", "Explained variance", "of the returns, by the critic"),
    ("train/entropy_loss", "Entropy", "nats per token"),
    ("train/pg_clipfrac", "Clip fraction", "share of tokens clipped"),
    ("train/ppo_kl", "KL of the update", "to the sampling policy"),
    ("train/kl_loss", "KL to the start", "to the reference model"),
    ("train/grad_norm", "Gradient norm", "before clipping"),
    ("train/lr", "Learning rate", ""),
    ("perf/tokens_per_second", "Throughput", "tokens per second"),
)
_PHASES = ("generate", "log_probs", "train", "sync_weights", "eval")


def column(rows: Sequence[Row], name: str, label: str = "") -> Series:
    """One metric over the steps, NaN for steps without it."""
    return Series(label or name, [row["step"] for row in rows], [row.get(name, math.nan) for row in rows])


def evaluation_series(rows: Sequence[Row]) -> list[Series]:
    """Held-out accuracy, one series per evaluation set."""
    names = sorted({n for row in rows for n in row if n.startswith("eval/") and n.endswith("/accuracy")})
    return [column(rows, n, n.removeprefix("eval/").removesuffix("/accuracy")) for n in names]


def _phase_series(rows: Sequence[Row]) -> list[Series]:
    """Seconds by phase, and what is left of the step as "other"."""
    seen = {name.removeprefix("time/") for row in rows for name in row if name.startswith("time/")} - {"step"}
    order = [p for p in _PHASES if p in seen] + sorted(seen.difference(_PHASES))
    phases = [column(rows, f"time/{phase}", phase) for phase in order]
    steps = column(rows, "time/step", "other")
    timed = [sum(y for y in ys if math.isfinite(y)) for ys in zip(*(p.ys for p in phases), strict=True)]
    left = [max(0.0, total - seconds) for total, seconds in zip(steps.ys, timed or [0.0] * len(rows), strict=True)]
    return [*phases, Series("other", steps.xs, left)]


def charts(rows: Sequence[Row]) -> str:
    """All figures that the rows have numbers for."""
    timed = [row for row in rows if any(name.startswith("time/") for name in row)]
    figures = [
        line_chart("Reward", "mean of the rollout", [column(rows, "rollout/reward")]),
        line_chart("Held-out accuracy", "evaluation sets", evaluation_series(rows)),
        *(line_chart(title, note, [column(rows, name)], name != "train/pg_loss") for name, title, note in _SINGLE),
        stacked_chart("Seconds by phase", "of every step", _phase_series(timed)) if timed else "",
    ]
    return "".join(figures)


def headline(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the figures that summarize a run: label, value, remark."""
    tiles = [("steps", str(len(rows)), "")]
    for series, label in [(column(rows, "rollout/reward"), "reward")] + [
        (s, f"held-out accuracy, {s.label}") for s in evaluation_series(rows)
    ]:
        if points := series.finite:
            best = max(y for _, y in points)
            tiles.append((label, number(points[-1][1]), f"from {number(points[0][1])}, best {number(best)}"))
    if seconds := column(rows, "time/step").finite:
        total = sum(y for _, y in seconds)
        tiles.append(("wall time", _duration(total), f"{number(total / len(seconds))} s per step"))
    return tiles


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
