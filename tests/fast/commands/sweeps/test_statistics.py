"""The statistics of a comparison against properties that any such statistic has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR

from miles.commands.sweeps.results import area, band, mean_of_last, over_seeds, paired_difference

VALUES = st.floats(-1e6, 1e6, allow_subnormal=False)
BY_SEED = st.dictionaries(st.integers(0, 50), VALUES, min_size=2, max_size=12)


def close(a: float, b: float, scale: float) -> bool:
    """Compare sums of a dozen numbers; ``scale`` is the largest of them."""
    return abs(a - b) <= DOUBLE_ERROR * max(scale, 1.0) or (math.isnan(a) and math.isnan(b))


def size(*values: dict[int, float]) -> float:
    return max(abs(value) for each in values for value in each.values())


@given(BY_SEED, BY_SEED)
def test_a_paired_difference_is_antisymmetric(a: dict[int, float], b: dict[int, float]) -> None:
    there, back = paired_difference(a, b), paired_difference(b, a)
    assert there.count == back.count == len(a.keys() & b.keys())
    for one, other in ((there.mean, -back.mean), (there.low, -back.high), (there.high, -back.low)):
        assert close(one, other, size(a, b))


@given(BY_SEED, VALUES)
def test_a_shift_of_every_pair_is_found_exactly(a: dict[int, float], shift: float) -> None:
    """Pairing removes the effect of the seeds: the interval has no width, however far apart the seeds are."""
    difference = paired_difference({seed: value + shift for seed, value in a.items()}, a)
    scale = size(a) + abs(shift)
    assert close(difference.mean, shift, scale) and close(difference.high - difference.low, 0.0, scale)


@given(BY_SEED)
def test_an_interval_is_around_the_mean_and_within_the_values(values: dict[int, float]) -> None:
    interval = over_seeds(values)
    slack = DOUBLE_ERROR * max(size(values), 1.0)
    assert min(values.values()) - slack <= interval.low <= interval.high <= max(values.values()) + slack
    assert close(interval.mean, float(np.mean([*values.values()])), size(values))


@given(BY_SEED)
def test_the_order_of_the_seeds_and_missing_values_do_not_matter(values: dict[int, float]) -> None:
    turned = dict(reversed(values.items())) | {99: math.nan, 98: math.inf}
    assert over_seeds(turned) == over_seeds(values)
    assert paired_difference(values, {**values, 77: 1.0}).count == len(values)


def test_too_few_seeds_have_no_interval() -> None:
    assert over_seeds({}).count == 0 and math.isnan(over_seeds({}).mean)
    one = over_seeds({3: 0.5})
    assert (one.mean, one.count) == (0.5, 1) and math.isnan(one.low) and math.isnan(one.high)
    assert paired_difference({1: 1.0}, {2: 1.0}).count == 0


@pytest.mark.parametrize(("seeds", "coverage"), [(4, 0.80), (8, 0.90), (30, 0.94)])
def test_the_interval_covers_as_often_as_the_docs_say(seeds: int, coverage: float) -> None:
    """Also the interval of an A/A pair: the difference of two draws from one distribution."""
    random, repeats = np.random.default_rng(0), 300
    covered = {"mean": 0, "pair": 0}
    for _ in range(repeats):
        a, b = (dict(enumerate(random.normal(0.3, 0.1, seeds))) for _ in "ab")
        mean, pair = over_seeds(a), paired_difference(a, b)
        covered["mean"] += mean.low <= 0.3 <= mean.high
        covered["pair"] += pair.low <= 0.0 <= pair.high
    four_deviations = 4 * math.sqrt(coverage * (1 - coverage) / repeats)
    assert all(abs(times / repeats - coverage) < four_deviations for times in covered.values()), covered


@given(st.lists(st.one_of(VALUES, st.just(math.nan)), min_size=1, max_size=20), st.integers(1, 25))
def test_summaries_see_only_what_was_measured(values: list[float], count: int) -> None:
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        assert all(math.isnan(summary) for summary in (mean_of_last(values, count), area(range(20), [math.nan] * 20)))
        return
    assert close(mean_of_last(values, count), sum(finite[-count:]) / len(finite[-count:]), max(map(abs, finite)))
    assert mean_of_last(values, 1) == finite[-1]


@given(st.floats(-10, 10), st.floats(-10, 10), st.sets(st.integers(1, 1000), min_size=2, max_size=20))
def test_the_area_of_a_straight_line_is_its_height_in_the_middle(slope: float, start: float, at: set[int]) -> None:
    """However unevenly it was measured; a step without the metric changes nothing."""
    steps = sorted(at)
    line = [start + slope * step for step in steps]
    middle = start + slope * (steps[0] + steps[-1]) / 2
    assert close(area(steps, line), middle, 1e4)
    assert close(area([*steps, 2000], [*line, math.nan]), middle, 1e4)
    assert area([7], [3.5]) == 3.5


def test_a_band_is_the_interval_of_each_step_and_has_none_where_runs_are_missing() -> None:
    random = np.random.default_rng(1)
    curves = random.normal(size=(8, 5))
    curves[:7, 3] = math.nan  # one run has it
    curves[:, 4] = math.nan
    mean, low, high = band(curves)
    assert np.allclose(mean[:3], curves[:, :3].mean(axis=0)) and mean[3] == curves[7, 3] and math.isnan(mean[4])
    assert np.isnan(low[3:]).all() and np.isnan(high[3:]).all()
    for step in range(3):
        exact = over_seeds(dict(enumerate(curves[:, step])))
        width = exact.high - exact.low
        # A quantile of 1,000 resamples against one of 10,000.
        assert abs(low[step] - exact.low) < 0.15 * width and abs(high[step] - exact.high) < 0.15 * width
    assert np.allclose(band(np.tile(curves[:1, :3], (4, 1)))[1], curves[0, :3]), "equal runs have a band of no width"
