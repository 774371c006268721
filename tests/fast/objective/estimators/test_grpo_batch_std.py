"""GRPO with the iteration's standard deviation, against ScaleRL's definition (2510.13786)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DEVIATION_ERROR

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.settings import LossArguments

BATCH_STD = LossArguments(advantage_estimator="grpo_batch_std")
GROUPS = st.lists(st.lists(st.floats(-10, 10), min_size=1, max_size=5), min_size=1, max_size=5)


@given(GROUPS)
def test_differences_are_divided_by_their_spread_over_the_iteration(advantages_of, groups):
    differences = [np.array(group) - np.mean(group) for group in groups]
    everything = np.concatenate(differences)
    spread = everything.std(ddof=1) if len(everything) > 1 else 0.0
    expected = [pytest.approx((d / (spread + 1e-6)).tolist(), abs=DEVIATION_ERROR) for d in differences]
    assert advantages_of(BATCH_STD, groups) == expected


def test_groups_keep_their_proportions(advantages_of):
    """GRPO makes both groups alike; here the wider one stays ten times as wide."""
    narrow, wide = advantages_of(BATCH_STD, [[0.1, 0.0], [1.0, 0.0]])
    assert wide == pytest.approx([10 * a for a in narrow])
    narrow, wide = advantages_of(LossArguments(), [[0.1, 0.0], [1.0, 0.0]])
    assert wide == pytest.approx(narrow, rel=1e-6 / 0.07)  # the addend of the deviations, over the smaller one


def test_refused_for_a_group_of_one(command):
    with pytest.raises(ValueError, match="with --advantage-estimator grpo_batch_std every advantage is 0"):
        validate(parse(f"{command} --advantage-estimator grpo_batch_std --n-samples-per-prompt 1".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator grpo_batch_std".split())))
    assert "std of d over the iteration" in text and "estimators/grpo_batch_std.py" in text
