"""Charts keep every point inside the frame, including gaps and single points."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.tracking.charts import HEIGHT, WIDTH, Series, line_chart, nice_ticks, smooth, stacked_chart

values = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=60)


def coordinates(svg: str) -> list[tuple[float, float]]:
    outlines = re.findall(r'points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for outline in outlines for pair in outline.split()]


def assert_inside(svg: str) -> None:
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in coordinates(svg))


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_ticks_cover_the_range_in_even_steps(a: float, b: float) -> None:
    low, high = sorted((a, b))
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9
    assert all(x < y for x, y in pairwise(ticks))


@given(values, st.booleans())
def test_curves_stay_inside(ys: list[float], from_zero: bool) -> None:
    svg = line_chart("title", "note", [Series("a", range(len(ys)), ys)], from_zero)
    assert bool(svg) == any(math.isfinite(y) for y in ys)
    assert_inside(svg)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=20))
def test_stacked_areas_stay_inside(rows: list[tuple[float, float]]) -> None:
    xs = range(len(rows))
    assert_inside(stacked_chart("t", "n", [Series(str(i), xs, [row[i] for row in rows]) for i in (0, 1)]))


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.integers(1, 9))
def test_smoothing_keeps_steps_and_bounds(ys: list[float], window: int) -> None:
    points = list(enumerate(ys))
    smoothed = smooth(points, window)
    assert [x for x, _ in smoothed] == [x for x, _ in points]
    assert all(min(ys) - 1e-9 <= y <= max(ys) + 1e-9 for _, y in smoothed)


@pytest.mark.parametrize("draw", [line_chart, stacked_chart])
def test_labels_are_escaped(draw) -> None:
    series = [Series(label, [0, 1], [1.0, 2.0]) for label in ("<b>", '"&')]
    svg = draw("<i>", '<u>"', series)
    assert not re.search(r"<(b|i|u)>", svg.replace("<i class", ""))
