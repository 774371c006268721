"""Seconds by phase, each second in one phase only.

The main loop times its phases one after another. The trainer times the parts of ``time/train``, which
replace it. Time in no phase is ``other``. With ``--async-steps`` generation overlaps the step: its
``time/rollout`` is no part of the step's seconds and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from miles.observe.report.metrics_file import MetricsFile

WALL = "time/step"
TRAIN = "time/train"
INSIDE_TRAIN = ("log_probs", "token_selection", "forward_backward", "optimizer", "critic", "ref_update")
OVERLAPPING = ("rollout",)
ORDER = ("generate", *INSIDE_TRAIN, "train, other", "sync_weights", "offload", "eval", "save", "other")


def seconds_by_phase(row: Mapping[str, float]) -> dict[str, float]:
    """Return the phases of one iteration; they add up to its ``time/step``.

    >>> seconds_by_phase({"time/step": 10.0, "time/train": 6.0, "time/forward_backward": 5.0, "time/generate": 3.0})
    {'generate': 3.0, 'forward_backward': 5.0, 'train, other': 1.0, 'other': 1.0}
    """
    timed = {name.removeprefix("time/"): s for name, s in row.items() if name.startswith("time/") and math.isfinite(s)}
    wall, train = timed.pop("step", math.nan), timed.pop("train", None)
    phases = {name: seconds for name, seconds in timed.items() if name not in OVERLAPPING}
    if train is not None:
        inside = {name: phases[name] for name in INSIDE_TRAIN if name in phases}
        # The ranks time the parts themselves, and clocks differ: more than the whole is scaled down to it.
        scale = min(1.0, train / max(sum(inside.values()), 1e-12))
        phases |= {name: seconds * scale for name, seconds in inside.items()}
        phases["train, other"] = max(0.0, train - sum(inside.values()))
    if math.isfinite(wall):
        phases["other"] = max(0.0, wall - sum(phases.values()))
    return {name: phases[name] for name in sorted(phases, key=_position)}


def _position(name: str) -> int:
    return ORDER.index(name) if name in ORDER else ORDER.index("other")


def iterations(metrics: MetricsFile, rows: range) -> list[tuple[int, dict[str, float]]]:
    """Return the step and the phases of each iteration: its rows, up to the one with ``time/step``, added up."""
    names = [name for name in metrics.names if name.startswith("time/")]
    columns = {name: metrics.column(name) for name in names}
    iterations: list[tuple[int, dict[str, float]]] = []
    summed: dict[str, float] = {}
    for index in rows:
        for name, column in columns.items():
            if math.isfinite(column[index]):
                summed[name] = summed.get(name, 0.0) + column[index]
        if WALL in summed:
            iterations.append((metrics.steps[index], seconds_by_phase(summed)))
            summed = {}
    return iterations


def phase_bars(metrics: MetricsFile, first: float | None, last: float | None, most: int) -> dict[str, Any]:
    """Return ``{"steps": [...], "phases": {name: [seconds]}, "per_bar": n}`` of at most ``most`` bars.

    A bar of several iterations shows their mean, and is named by the last of them.
    """
    found = iterations(metrics, metrics.rows_between(first, last))
    per_bar = max(1, math.ceil(len(found) / most))
    bars = [found[i : i + per_bar] for i in range(0, len(found), per_bar)]
    names = sorted({name for _, phases in found for name in phases}, key=_position)
    return {
        "steps": [bar[-1][0] for bar in bars],
        "phases": {name: [_mean(bar, name) for bar in bars] for name in names},
        "per_bar": per_bar,
    }


def _mean(bar: Sequence[tuple[int, Mapping[str, float]]], name: str) -> float:
    return float(f"{sum(phases.get(name, 0.0) for _, phases in bar) / len(bar):.4g}")
