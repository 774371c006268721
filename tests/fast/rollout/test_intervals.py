"""Intervals of evaluation metrics contain the mean that they are of as often as they say."""

import numpy as np
import pytest
from tolerance import places

from miles.rollout.intervals import bootstrap, mean_over_prompts, wilson


@pytest.mark.parametrize(
    ("passes", "count", "low", "high"),
    [(0, 10, 0.0, 0.27753), (1, 10, 0.01788, 0.40415), (5, 10, 0.23659, 0.76341), (10, 10, 0.72247, 1.0)],
)
def test_wilson(passes, count, low, high):
    """Values of the published formula, to five digits."""
    assert wilson(passes, count) == pytest.approx((low, high), abs=places(5))


def test_values_that_pass_or_fail_get_wilsons_interval():
    assert mean_over_prompts([0, 1, 1]).method == "Wilson"
    assert mean_over_prompts([0, 0.5, 1]).method == "bootstrap"


def test_the_bootstrap_covers_the_mean():
    """Of the intervals of 50 sets of 40 prompts, about 95 % hold the true mean. The sets are always the same ones."""
    random = np.random.default_rng(3)
    sets = random.beta(2, 5, size=(50, 40))
    bounds = [bootstrap(values) for values in sets.tolist()]
    covered = sum(low <= 2 / 7 <= high for low, high in bounds)
    assert covered >= 44
    assert bootstrap(sets[0].tolist()) == bounds[0], "the same values give the same interval"
