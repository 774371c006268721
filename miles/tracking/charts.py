"""Curves as inline SVG: drawn in Python, coloured by the page's style sheet, hover values left to the page's script."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 26
MANY_POINTS = 40  # from here on a curve gets a smoothed line over a faint exact one


@dataclass(frozen=True)
class Series:
    """One curve: ``ys[i]`` at step ``xs[i]``, NaN where nothing was measured."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def finite(self) -> list[tuple[float, float]]:
        """The measured points."""
        return [(x, y) for x, y in zip(self.xs, self.ys, strict=True) if math.isfinite(y)]


def number(value: float) -> str:
    """Return a value as people read it: four significant digits."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) that cover ``[low, high]``, ends included.

    >>> nice_ticks(0.0, 0.93)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low <= max(abs(low), abs(high)) * 1e-9 or high - low < 1e-300:  # nothing that floats could tell apart
        margin = abs(low) * 0.1 if abs(low) > 1e-290 else 0.5
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = min((f * power for f in (1, 2, 5, 10)), key=lambda candidate: abs(candidate - rough))
    first, last = math.floor(low / spacing + 1e-9), math.ceil(high / spacing - 1e-9)
    return [float(f"{i * spacing:.10g}") for i in range(first, last + 1)]


def smooth(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Centred moving mean over ``window`` points, fewer at the ends."""
    half = window // 2
    means = []
    for i, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, i - half) : i + half + 1]]
        means.append((x, sum(near) / len(near)))
    return means


@dataclass(frozen=True)
class Axes:
    """Maps steps and values onto the drawing; the outermost y ticks are its edges."""

    x_low: float
    x_high: float
    y_ticks: list[float]

    @classmethod
    def around(cls, points: Sequence[tuple[float, float]], from_zero: bool) -> Axes:
        """Axes that hold all points; ``from_zero`` keeps the zero line visible."""
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        return cls(min(xs), max(xs), nice_ticks(low, high))

    def x(self, step: float) -> float:
        """Horizontal position of a step; the middle when there is only one."""
        span = self.x_high - self.x_low
        part = (step - self.x_low) / span if span else 0.5
        return round(LEFT + part * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Vertical position of a value."""
        part = (value - self.y_ticks[0]) / (self.y_ticks[-1] - self.y_ticks[0])
        return round(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM), 1)

    def svg(self) -> str:
        """Grid lines and tick labels."""
        parts = []
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 3.5}" text-anchor="end">{number(tick)}</text>')
        for tick in self._x_ticks():
            parts.append(
                f'<text class="tick" x="{self.x(tick)}" y="{HEIGHT - 8}" text-anchor="middle">{number(tick)}</text>'
            )
        return "".join(parts)

    def _x_ticks(self) -> list[float]:
        ticks = nice_ticks(self.x_low, self.x_high, 5) if self.x_high > self.x_low else [self.x_low]
        return [tick for tick in ticks if self.x_low <= tick <= self.x_high and tick == int(tick)]


def _polyline(points: Sequence[tuple[float, float]], axes: Axes, css: str) -> str:
    path = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in points)
    return f'<polyline class="{css}" points="{path}"/>'


def _curve(series: Series, axes: Axes, colour: int) -> str:
    points = series.finite
    if len(points) < MANY_POINTS:
        dots = "".join(
            f'<circle class="dot c{colour}" cx="{axes.x(x)}" cy="{axes.y(y)}" r="{2.4 if len(points) < 25 else 1.4}"/>'
            for x, y in points
        )
        return _polyline(points, axes, f"line c{colour}") + dots
    smoothed = smooth(points, max(3, len(points) // 20))
    return _polyline(points, axes, f"line faint c{colour}") + _polyline(smoothed, axes, f"line c{colour}")


def _figure(title: str, note: str, series: Sequence[Series], colours: Sequence[int], axes: Axes, marks: str) -> str:
    """Return a titled SVG with a legend; the exact points ride along as JSON for the hover script."""
    hover = {
        "x": [axes.x_low, axes.x_high, LEFT, WIDTH - RIGHT, WIDTH],
        "series": [
            {"label": s.label, "colour": c, "points": [[x, float(f"{y:.5g}")] for x, y in s.finite]}
            for s, c in zip(series, colours, strict=True)
        ],
    }
    several = len(series) > 1
    keys = "".join(
        f'<span><i class="key c{c}"></i>{escape(s.label)}</span>' for s, c in zip(series, colours, strict=True)
    )
    legend = f'<div class="legend">{keys}</div>' if several else ""
    newest = "" if several else f"<b>{number(series[0].finite[-1][1])}</b>"
    label = escape(f"{title} against step", quote=True)
    return (
        f'<figure data-hover="{escape(json.dumps(hover), quote=True)}">'
        f"<figcaption><span>{escape(title)}{newest}</span><small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{axes.svg()}{marks}'
        f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/></svg>'
        f"{legend}</figure>"
    )


def line_chart(title: str, note: str, series: Sequence[Series], from_zero: bool = True) -> str:
    """Curves over one pair of axes. Series without a measured point are left out; none left gives an empty string."""
    measured = [s for s in series if s.finite]
    if not measured:
        return ""
    axes = Axes.around([point for s in measured for point in s.finite], from_zero)
    colours = list(range(len(measured)))
    marks = "".join(_curve(s, axes, c % 8) for s, c in zip(measured, colours, strict=True))
    return _figure(title, note, measured, [c % 8 for c in colours], axes, marks)


def stacked_chart(title: str, note: str, series: Sequence[Series]) -> str:
    """Areas on top of one another, one a series, over common ``xs``; NaN counts as 0.

    A step is as wide as its neighbours are apart, so that areas are seconds, not interpolations.
    """
    measured = [s for s in series if any(y > 0 for _, y in s.finite)]
    if not measured:
        return ""
    xs = list(measured[0].xs)
    assert all(list(s.xs) == xs for s in measured), "stacked series share their steps"
    between = [(a + b) / 2 for a, b in pairwise(xs)]
    first, last = (between[0] - xs[0], xs[-1] - between[-1]) if between else (0.5, 0.5)
    edges = [xs[0] - first, *between, xs[-1] + last]
    base, layers = [0.0] * len(xs), []
    for s in measured:
        top = [b + (y if math.isfinite(y) else 0.0) for b, y in zip(base, s.ys, strict=True)]
        layers.append((base, top))
        base = top
    axes = Axes(edges[0], edges[-1], nice_ticks(0.0, max(base)))
    marks = "".join(_layer(edges, low, high, axes, c % 8) for c, (low, high) in enumerate(layers))
    return _figure(title, note, measured, [c % 8 for c in range(len(measured))], axes, marks)


def _layer(edges: Sequence[float], low: Sequence[float], high: Sequence[float], axes: Axes, colour: int) -> str:
    """Return the area between two step-shaped outlines."""
    bars = list(enumerate(pairwise(edges)))
    over = [(x, high[i]) for i, ends in bars for x in ends]
    under = [(x, low[i]) for i, ends in bars for x in ends]
    outline = " ".join(f"{axes.x(x)},{axes.y(y)}" for x, y in [*over, *reversed(under)])
    return f'<polygon class="area c{colour}" points="{outline}"/>'
