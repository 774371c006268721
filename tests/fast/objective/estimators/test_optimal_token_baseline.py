"""The optimal token baseline against arXiv 2602.07078, position by position in plain Python."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import FEW_ROUNDINGS

from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages
from miles.training.trainer import _score_norm

# A token: the probability of the one that was sampled, the sum of all squared ones, and whether it is a loss token.
TOKENS = st.lists(st.tuples(st.floats(0.05, 0.95), st.floats(0, 1), st.booleans()), min_size=1, max_size=6)
GROUPS = st.lists(st.lists(st.tuples(st.floats(-2, 2), TOKENS), min_size=1, max_size=4), min_size=1, max_size=3)


def norm_of(p, rest):
    """1 - 2 p + sum of squares, which is at least p^2."""
    return 1 - 2 * p + p * p + rest * (1 - p) ** 2


def samples_of(groups):
    samples = []
    for number, group in enumerate(groups):
        for reward, tokens in group:
            norms = np.array([norm_of(p, rest) for p, rest, _ in tokens])
            mask = np.array([float(is_used) for *_, is_used in tokens], np.float32)
            samples.append(SampleTokens(len(samples), reward, mask, group_index=number, score_norm=norms))
    return samples


def advantages_of(group, zero_tail):
    """Transcribe the formula: one list per response, of its loss tokens."""
    norms = [[norm_of(p, rest) for p, rest, is_used in tokens if is_used] for _, tokens in group]
    rewards = [reward for reward, _ in group]
    lengths = sorted(map(len, norms))
    advantages = [[] for _ in norms]
    for t in range(lengths[-1]):
        alive = [i for i, of in enumerate(norms) if len(of) > t]
        energies = {i: math.fsum(norms[i][: t + 1]) for i in alive}
        baseline = math.fsum(rewards[i] * energies[i] for i in alive) / (math.fsum(energies.values()) + 1e-8)
        if zero_tail and len(lengths) > 1 and t >= lengths[-2]:
            baseline = 0.0
        for i in alive:
            advantages[i].append(rewards[i] - baseline)
    return advantages


@given(GROUPS, st.booleans())
def test_advantages_are_those_of_the_formula(groups, zero_tail):
    loss = LossArguments(advantage_estimator="optimal_token_baseline", otb_zero_tail=zero_tail)
    columns = iter(token_advantages(build_objective(loss), samples_of(groups)).advantages)
    for group in groups:
        for (_, tokens), expected in zip(group, advantages_of(group, zero_tail), strict=True):
            column = next(columns)
            mask = np.array([mask for *_, mask in tokens])
            np.testing.assert_allclose(column[mask], expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
            assert not column[~mask].any()


ROUNDED = 1e-7  # by how much a log-prob and the sum are changed


@given(st.integers(0, 60), st.floats(0, 1), st.floats(-ROUNDED, ROUNDED), st.floats(-ROUNDED, ROUNDED))
def test_a_score_norm_is_within_its_bounds_as_p_goes_to_1(exponent, rest, rounded_p, rounded_sum):
    """Near 1, scores are rounded to about 1e-7, and the norm is smaller: it must not become negative."""
    apart = 2.0**-exponent
    p = 1.0 - apart
    log_prob = np.float32(math.log(p) + rounded_p if p > 0 else -90.0)
    batch = SimpleNamespace(
        old_log_probs=[np.array([log_prob], np.float32)],
        sum_squared_probs=[np.array([p * p + rest * apart**2 + rounded_sum])],
    )
    norm = _score_norm(batch, 0)
    assert norm is not None and norm.dtype == np.float64
    assert norm[0] >= 0 and norm[0] == pytest.approx(norm_of(p, rest), abs=4 * ROUNDED + FEW_ROUNDINGS * apart)


def test_responses_of_one_length_and_one_energy_have_the_mean_as_baseline():
    group = [(reward, [(0.5, 0.5, True)] * 3) for reward in (1.0, 0.0, 0.0, 1.0)]
    loss = LossArguments(advantage_estimator="optimal_token_baseline")
    advantages = token_advantages(build_objective(loss), samples_of([group])).advantages
    np.testing.assert_allclose(np.array(advantages)[:, 0], [0.5, -0.5, -0.5, 0.5], rtol=FEW_ROUNDINGS)


def test_the_end_of_the_longest_response_is_not_trained_on_unless_asked():
    group = [(1.0, [(0.5, 0.5, True)] * 5), (0.0, [(0.5, 0.5, True)] * 2)]
    for zero_tail, expected in ((False, 0.0), (True, 1.0)):
        loss = LossArguments(advantage_estimator="optimal_token_baseline", otb_zero_tail=zero_tail)
        advantages = token_advantages(build_objective(loss), samples_of([group])).advantages[0]
        np.testing.assert_allclose(advantages[2:], [expected] * 3, atol=FEW_ROUNDINGS)


def test_the_kl_in_the_reward_is_part_of_the_return():
    loss = LossArguments(advantage_estimator="optimal_token_baseline", kl_coef=0.5)
    ratio = np.array([0.2, 0.4], np.float32)
    pair = [
        SampleTokens(i, reward, np.ones(2, np.float32), None, ratio * i, group_index=0, score_norm=np.ones(2))
        for i, reward in enumerate((1.0, 3.0))
    ]
    advantages = token_advantages(build_objective(loss), pair).advantages
    # Returns of the second: 3 - 0.5 (0.2 + 0.4) and 3 - 0.5 * 0.4; both have the same weight.
    np.testing.assert_allclose(advantages[1], [(2.7 - 1.0) / 2, (2.8 - 1.0) / 2], rtol=FEW_ROUNDINGS)
    np.testing.assert_allclose(advantages[0], -advantages[1], rtol=FEW_ROUNDINGS)


@pytest.mark.parametrize("flags", ["--global-batch-size 2", "--num-steps-per-rollout 16"])
def test_a_step_must_have_whole_groups(flags):
    from miles.config.parser import parse
    from miles.config.validate import validate

    words = (
        "--hf-checkpoint m --prompt-data reasoning_gym:products --rm-type math --num-rollout 1 --rollout-batch-size 8 "
        f"--rollout-max-response-len 8 --n-samples-per-prompt 4 --advantage-estimator optimal_token_baseline {flags}"
    )
    with pytest.raises(ValueError, match="compares whole groups of 4 in a step"):
        validate(parse(words.split()))
