"""The statistics of a comparison: one figure per run, and means over seeds with intervals.

Runs of two variants with one seed begin with the same weights and prompts, so what is compared is their difference,
seed by seed. Intervals are 95 % percentile bootstrap intervals of a mean (Efron 1979), over seeds. Few seeds make them
too narrow: of 8 draws from a normal distribution they cover the mean in about 90 % of the cases, of 4 in about 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miles.rollout.intervals import CONFIDENCE, bootstrap

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


def final(values: Sequence[float]) -> float:
    """Return the last finite value; NaN without one."""
    return next((float(value) for value in reversed(values) if math.isfinite(value)), math.nan)


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

    The bounds are those of each step alone: a band does not hold whole curves with 95 %.

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


def _divided(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    quotients = np.full(np.shape(sums), math.nan)
    np.divide(sums, counts, out=quotients, where=counts > 0)
    return quotients
