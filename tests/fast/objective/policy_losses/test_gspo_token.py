"""GSPO-token against Eq. 13 and 14 of 2507.18071, with advantages that differ within a sequence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tolerance import FEW_ROUNDINGS

from miles.objective.settings import LossArguments


def sequence_loss(p, old, a, low=0.8, high=1.2):
    ratio = ((p - old).mean()).exp().detach() * (p - p.detach()).exp()
    return torch.maximum(-ratio * a, -ratio.clamp(low, high) * a).mean()


@pytest.mark.parametrize("seed", range(6))
def test_each_token_has_its_own_advantage_and_the_sequences_ratio(off_policy, gradient_of, seed):
    case = off_policy(seed, 0.3)
    advantages = torch.randn(len(case.log_probs), generator=torch.Generator().manual_seed(seed))
    case = replace(case, micro=replace(case.micro, advantages=advantages))
    mask, start = case.micro.loss_mask != 0, 0
    samples = []
    for (p, old, _), length in zip(case.samples, case.micro.response_lengths, strict=True):
        own = slice(start, start + length)
        samples.append((p, old, advantages[own][mask[own]].double()))
        start += length
    expected_loss, expected = replace(case, samples=samples).expected(sequence_loss)
    loss, gradient, _ = gradient_of(LossArguments(policy_loss="gspo_token"), case.micro, case.log_probs)
    assert loss == pytest.approx(expected_loss, rel=FEW_ROUNDINGS, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(gradient, expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


def test_it_is_gspo_if_a_sequence_has_one_advantage(off_policy, gradient_of):
    case = off_policy(1)
    results = [
        gradient_of(LossArguments(policy_loss=name), case.micro, case.log_probs) for name in ("gspo", "gspo_token")
    ]
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
