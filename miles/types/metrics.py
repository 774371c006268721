"""A metric is a numerator and a denominator until the moment it is read. A mean is never a mean of means."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """``numerator / denominator``; adding two metrics adds both, so that any order of reduction gives one number.

    >>> (Metric(1.0, 2.0) + Metric(5.0, 6.0)).value
    0.75
    """

    numerator: float
    denominator: float = 1.0

    def __add__(self, other: Metric) -> Metric:
        return Metric(self.numerator + other.numerator, self.denominator + other.denominator)

    @property
    def value(self) -> float:
        """The quotient; NaN when nothing was counted (denominator 0)."""
        return self.numerator / self.denominator if self.denominator else math.nan

    @classmethod
    def mean(cls, values: Iterable[float]) -> Metric:
        """Return the mean of ``values`` as a metric: their sum over their count."""
        values = list(values)
        return cls(float(sum(values)), float(len(values)))


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Read every metric."""
    return {name: metric.value for name, metric in metrics.items()}


_HELD_OUT = re.compile(r"eval/((?:(?!/reward_parts/).)+)/(accuracy|reward)")


def held_out_metrics(names: Iterable[str]) -> dict[str, str]:
    """Return the metric of each evaluation set that measures how good its answers are: the mean reward.

    Runs of earlier versions have it under the name of accuracy alone.

    >>> held_out_metrics(["eval/a/accuracy", "eval/a/reward", "eval/old/accuracy", "eval/a/reward_parts/x"])
    {'a': 'eval/a/reward', 'old': 'eval/old/accuracy'}
    """
    return {match[1]: name for name in sorted(names) if (match := _HELD_OUT.fullmatch(name)) is not None}
