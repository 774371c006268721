"""Confidence intervals of evaluation metrics. Prompts are sampled, so prompts are resampled."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
Z = 1.959963984540054  # of the standard normal distribution, two-sided 95 %
RESAMPLES = 10_000
_AT_ONCE = 1 << 22  # numbers that a resampling holds


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its 95 % interval, and the method of the interval."""

    value: float
    low: float
    high: float
    method: str

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_over_prompts(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per prompt, with its interval.

    If every value is 0 or 1, as with one answer per prompt that passes or not, the interval is Wilson's (1927): it is
    right for few prompts, and for means near 0 or 1. Otherwise it is the percentile bootstrap over prompts.

    >>> str(mean_over_prompts([1, 1, 1, 1]))
    '1.000 [0.510, 1.000]'
    """
    assert values, "an evaluation set has at least one prompt"
    mean = math.fsum(values) / len(values)
    if all(value in (0, 1) for value in values):
        return Estimate(mean, *wilson(round(math.fsum(values)), len(values)), "Wilson")
    return Estimate(mean, *bootstrap(values), "bootstrap")


def wilson(passes: int, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a share.

    >>> [round(bound, 4) for bound in wilson(passes=8, count=10)]
    [0.4902, 0.9433]
    """
    share, weight = passes / count, Z**2 / count
    center = (share + weight / 2) / (1 + weight)
    reach = Z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, center - reach), min(1.0, center + reach)


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a mean. The same values give the same interval."""
    numbers = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    rows = max(1, _AT_ONCE // len(numbers))
    means = [
        numbers[random.integers(len(numbers), size=(min(rows, RESAMPLES - done), len(numbers)))].mean(axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)
