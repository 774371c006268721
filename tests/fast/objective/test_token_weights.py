"""What corrections and the choice of tokens do to the weight of a token's loss, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import FEW_ROUNDINGS

from miles.objective.settings import LossArguments
from miles.objective.token_weights import ratios_of, token_weights_of, top_entropy_tokens, weigh


def weights(make_micro, loss: LossArguments, ratios: list[float]) -> list[float]:
    """The weights of one sample's tokens whose ratios of trainer to engine are ``ratios``."""
    ratios_of_tokens = ratios_of(
        make_micro([[1] * len(ratios)]), torch.zeros(len(ratios)), trainer_log_probs=torch.tensor(ratios).log()
    )
    return weigh(token_weights_of(loss), loss, ratios_of_tokens).weights.tolist()


def test_truncation_bounds_the_ratio(make_micro):
    loss = LossArguments(use_tis=True, tis_clip=2.0, tis_clip_low=0.5)
    assert weights(make_micro, loss, [0.25, 1.5, 4.0]) == pytest.approx([0.5, 1.5, 2.0])


def test_icepop_drops_what_lies_outside(make_micro):
    loss = LossArguments(use_tis=True, tis_clip=2.0, tis_clip_low=0.5, tis_mode="icepop")
    assert weights(make_micro, loss, [0.25, 1.5, 4.0]) == pytest.approx([0.0, 1.5, 0.0])


def test_rejection_alone_keeps_weights_of_one(make_micro):
    loss = LossArguments(use_rs=True, rs_lower_bound=0.5, rs_upper_bound=3.0)
    assert weights(make_micro, loss, [0.25, 1.5, 2.5, 4.0]) == [0.0, 1.0, 1.0, 0.0]


def test_rejection_and_truncation_compose(make_micro):
    """A token that is not rejected keeps its truncated ratio."""
    loss = LossArguments(use_tis=True, tis_clip=2.0, use_rs=True, rs_lower_bound=0.5, rs_upper_bound=3.0)
    assert weights(make_micro, loss, [0.25, 1.5, 2.5, 4.0]) == pytest.approx([0.0, 1.5, 2.0, 0.0])


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LossArguments(use_tis=True, tis_clip=3.0), [0.25, 3.0, 3.0, 0.5]),
        (LossArguments(use_tis=True, tis_clip=3.0, tis_level="sequence"), [1.0, 1.0, 2.0, 2.0]),
        (LossArguments(use_tis=True, tis_clip=3.0, tis_level="geometric"), [1.0, 1.0, 2.0**0.5, 2.0**0.5]),
        (LossArguments(use_rs=True, rs_lower_bound=0.4, rs_upper_bound=5.0), [0, 1, 1, 1]),
        (LossArguments(use_rs=True, rs_level="sequence", rs_lower_bound=0.4, rs_upper_bound=1.9), [1, 1, 0, 0]),
        (LossArguments(use_rs=True, rs_level="geometric", rs_lower_bound=0.4, rs_upper_bound=1.9), [1, 1, 1, 1]),
        (LossArguments(use_rs=True, rs_level="geometric", rs_lower_bound=0.4, rs_upper_bound=1.4), [1, 1, 0, 0]),
        (LossArguments(use_rs=True, rs_upper_bound=5.0, rs_lower_bound=0.0, rs_veto_threshold=0.3), [0, 0, 1, 1]),
    ],
)
def test_the_ratio_is_that_of_a_token_or_its_sequence(make_micro, loss, expected):
    """Ratios of 1/4 and 4 in one sequence, whose product is 1, and of 4 and 1/2 in the other, whose product is 2."""
    micro = make_micro([[1, 1], [1, 1]])
    trainer_log_probs = torch.tensor([0.25, 4.0, 4.0, 0.5]).log()
    result = weigh(token_weights_of(loss), loss, ratios_of(micro, torch.zeros(4), trainer_log_probs))
    assert result.weights.tolist() == pytest.approx(expected, rel=FEW_ROUNDINGS)


def test_normalized_weights_are_divided_by_the_mean_of_the_step(make_micro):
    """The mean comes with the micro-batch, and is not the mean of its own weights, which are 0.5 and 2."""
    micro = make_micro([[1, 1]], tis_mean=0.8)
    loss = LossArguments(use_tis=True, tis_clip=2.0, tis_batch_normalize=True)
    result = weigh(token_weights_of(loss), loss, ratios_of(micro, torch.zeros(2), torch.tensor([0.5, 4.0]).log()))
    assert result.weights.tolist() == pytest.approx([0.5 / 0.8, 2.0 / 0.8], rel=FEW_ROUNDINGS)


def test_off_policy_masking_drops_what_is_above_the_bound_not_at_it(make_micro):
    """Means of log old - log current of 0.5, 0.5 + 1/1024 and 8; the last has a positive advantage."""
    micro = make_micro([[1, 1], [1, 1], [1]], advantages=torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0]))
    log_ratio = torch.tensor([-0.25, -0.75, -0.5, -0.5 - 2 / 1024, -8.0])
    loss = LossArguments(use_opsm=True, opsm_delta=0.5)
    result = weigh(token_weights_of(loss), loss, ratios_of(micro, log_ratio, trainer_log_probs=torch.zeros(5)))
    assert result.weights.tolist() == [1, 1, 0, 0, 1]
    assert result.logged["opsm_clipfrac"].tolist() == [0, 0, 1, 1, 0]


@given(st.lists(st.floats(0, 12), max_size=30), st.floats(0.01, 1.0))
def test_the_most_uncertain_tokens_are_kept(entropies, fraction):
    """As many as the fraction states, up to the interpolation between two tokens and equal entropies."""
    mask = top_entropy_tokens(np.array(entropies), fraction)
    least = int(fraction * len(entropies))
    assert len(mask) == len(entropies) and sum(mask) >= min(least, len(entropies))
    left = [e for e, is_kept in zip(entropies, mask, strict=True) if not is_kept]
    assert not left or max(left) < min(e for e, is_kept in zip(entropies, mask, strict=True) if is_kept)
    apart = np.diff(np.sort(entropies)).min(initial=1.0) > 1e-4
    assert not apart or sum(mask) <= least + 1


@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_entropies_that_are_equal_up_to_rounding_are_kept_or_left_together(levels, fraction, seed):
    exact, rng = np.array(levels) / 3, np.random.default_rng(seed)
    mask = top_entropy_tokens(exact, fraction)
    for _ in range(3):
        assert top_entropy_tokens(exact + rng.uniform(-2e-6, 2e-6, len(exact)), fraction).tolist() == mask.tolist()
