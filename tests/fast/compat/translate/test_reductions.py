"""The objectives of other trainers on the two examples. Every number was computed by hand from the formulas' text."""

from fractions import Fraction

import pytest
from tolerance import DOUBLE_ERROR

from miles.compat.translate import translation as r
from miles.compat.translate.translation import UNEVEN, Response, Step, our_value

# docs/loss-aggregation.md: every token of trajectory 1 has loss 1, all others 0.
WORKED = Step(
    "worked example",
    (Response(0, 2, 1.0), Response(0, 6, 0.0), Response(1, 4, 0.0), Response(1, 8, 0.0)),
    (((0, 1, 2, 3),),),
    20.0,
)

# reduction -> worked example (S_1 = 2, T = 20, N = 4), uneven batch (S = 1 2 3 0 -4 3 -4 4, T = 32, N = 8)
BY_HAND = {
    r.token_mean: ("2/20", "5/32"),
    r.token_mean_counting_masked: ("2/20", "5/33"),
    r.token_mean_of_generation: ("2/20", "5/40"),
    r.token_mean_of_micro_batches: ("2/20", "7/24"),  # (-3/9 + 5/5 + 3/6 + 0/12) / 4
    r.token_mean_of_ranks: ("2/20", "13/84"),  # (2/14 + 3/18) / 2
    r.sequence_mean: ("1/4", "7/16"),
    r.sequence_mean_of_unmasked: ("1/4", "1/2"),
    r.token_sum: ("2", "5"),
    r.sequence_sum_mean: ("1/2", "5/8"),
    r.over_padded_width: ("1/16", "43/192"),  # (-3/8 + 5/3 + 3/6 + 0/8) / 8
}


@pytest.mark.parametrize("reduction", BY_HAND, ids=lambda reduction: reduction.__name__)
def test_values_are_those_computed_by_hand(reduction):
    expected = [float(Fraction(text)) for text in BY_HAND[reduction]]
    assert [reduction(WORKED), reduction(UNEVEN)] == pytest.approx(expected, rel=DOUBLE_ERROR)


def test_dividing_by_the_maximal_length_is_dr_grpo():
    assert r.over_longest(r.sequence_sum_mean)(UNEVEN) == pytest.approx(5 / 64)
    assert r.over_longest(r.sequence_sum_mean)(UNEVEN) == pytest.approx(our_value("constant", UNEVEN, 8.0))


@pytest.mark.parametrize(
    ("reduction", "mode", "divisor"),
    [
        (r.token_mean, "token_mean", None),
        (r.sequence_mean, "sample_mean", None),
        (r.sequence_sum_mean, "constant", 1.0),
        (r.token_sum, "constant", 1 / 8),
    ],
)
def test_exact_counterparts_give_every_token_the_same_weight(reduction, mode, divisor):
    distance = r.distance(reduction, lambda step: our_value(mode, step, divisor), UNEVEN)
    assert distance == pytest.approx(0, abs=DOUBLE_ERROR)


def test_token_weights_of_a_mean_of_micro_batches():
    weights = r.token_weights(r.token_mean_of_micro_batches, UNEVEN)
    assert weights == pytest.approx([1 / 36, 1 / 20, 1 / 20, 0, 1 / 36, 1 / 24, 1 / 48, 1 / 48])


def test_the_uneven_batch_holds_every_response_once_and_both_prompts_on_both_ranks():
    indices = [place for rank in UNEVEN.ranks for micro in rank for place in micro]
    assert sorted(indices) == list(range(len(UNEVEN.responses)))
    assert [{response.prompt for response in rank} for rank in UNEVEN.of_ranks] == [{0, 1}, {0, 1}]
