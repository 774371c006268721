"""What corrections and the choice of tokens do to the weight of a token's loss, number by number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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
    """What is not rejected keeps its truncated ratio."""
    loss = LossArguments(use_tis=True, tis_clip=2.0, use_rs=True, rs_lower_bound=0.5, rs_upper_bound=3.0)
    assert weights(make_micro, loss, [0.25, 1.5, 2.5, 4.0]) == pytest.approx([0.0, 1.5, 2.0, 0.0])


def test_off_policy_masking_drops_what_is_above_the_bound_not_at_it(make_micro):
    """Means of log old - log current of 0.5, 0.5 + 1/1024 and 8; the last has a positive advantage."""
    micro = make_micro([[1, 1], [1, 1], [1]], advantages=torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0]))
    log_ratio = torch.tensor([-0.25, -0.75, -0.5, -0.5 - 2 / 1024, -8.0])
    loss = LossArguments(use_opsm=True, opsm_delta=0.5)
    found = weigh(token_weights_of(loss), loss, ratios_of(micro, log_ratio, trainer_log_probs=torch.zeros(5)))
    assert found.weights.tolist() == [1, 1, 0, 0, 1]
    assert found.logged["opsm_clipfrac"].tolist() == [0, 0, 1, 1, 0]


@given(st.lists(st.floats(0, 12), max_size=30), st.floats(0.01, 1.0))
def test_the_most_uncertain_tokens_are_kept(entropies, fraction):
    """As many as the fraction says, up to the interpolation between two tokens and equal entropies."""
    kept = top_entropy_tokens(np.array(entropies), fraction)
    least = int(fraction * len(entropies))
    assert len(kept) == len(entropies) and sum(kept) >= min(least, len(entropies))
    left = [e for e, is_kept in zip(entropies, kept, strict=True) if not is_kept]
    assert not left or max(left) < min(e for e, is_kept in zip(entropies, kept, strict=True) if is_kept)
    assert len(set(entropies)) < len(entropies) or sum(kept) <= least + 1
