from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.metrics import pass_at_k, pass_at_k_metrics, powers_of_two

outcomes = st.lists(st.booleans(), min_size=1, max_size=8)


@given(outcomes, st.integers(1, 8))
def test_it_is_the_share_of_k_subsets_with_a_pass(passed, k):
    k = min(k, len(passed))
    subsets = list(combinations(passed, k))
    expected = Fraction(sum(any(subset) for subset in subsets), len(subsets))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(float(expected), abs=1e-12)


def test_powers_of_two_end_at_the_largest_that_fits():
    assert [powers_of_two(n) for n in (1, 2, 3, 8)] == [[1], [1, 2], [1, 2], [1, 2, 4, 8]]


def test_metrics_average_over_prompts_that_have_k_responses():
    metrics = pass_at_k_metrics([[1.0, 0.0], [0.0, 0.5], [2.0]])
    assert metrics["pass@1"].value == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["pass@2"].value == pytest.approx(1 / 2)
    assert set(metrics) == {"pass@1", "pass@2"}
