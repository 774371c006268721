"""GAE and its neighbours against their definitions, token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR, FEW_ROUNDINGS

from miles.objective import token_advantages as phase_two
from miles.objective.chosen import build_objective
from miles.objective.estimators.base import TrajectoryTokens
from miles.objective.estimators.ppo import generalized_advantages
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, StepAdvantages, whitened

PPO = LossArguments(advantage_estimator="ppo", gamma=0.5, lambd=0.5)
NUMBERS = st.floats(-3, 3, allow_nan=False)
ROWS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=7), max_size=5)


def token_advantages(loss: LossArguments, samples: list[SampleTokens]) -> StepAdvantages:
    return phase_two.token_advantages(build_objective(loss), samples)


def generalized(rewards, values, gamma, lambd):
    pairs = zip(rewards, values, strict=True)
    return generalized_advantages([TrajectoryTokens(r, v, 0, np.zeros(0)) for r, v in pairs], gamma, lambd)


def sample(rollout, mask, reward=0.0, values=None, log_ratio=None):
    def column(numbers):
        return None if numbers is None else np.asarray(numbers, np.float32)

    return SampleTokens(rollout, reward, column(mask), column(values), column(log_ratio))


@given(ROWS, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_double_sum(rows, gamma, lambd):
    rewards = [np.array([r for r, _ in row]) for row in rows]
    values = [np.array([v for _, v in row]) for row in rows]
    all_advantages = generalized(rewards, values, gamma, lambd)
    assert len(all_advantages) == len(rows)
    for r, v, advantages in zip(rewards, values, all_advantages, strict=True):
        following = [*v[1:], 0.0]
        delta = [r[t] + gamma * following[t] - v[t] for t in range(len(r))]
        for t, advantage in enumerate(advantages):
            expected = sum((gamma * lambd) ** (k - t) * delta[k] for k in range(t, len(r)))
            assert advantage == pytest.approx(expected, abs=DOUBLE_ERROR)


def test_the_ends_of_lambda():
    """At 1 the return minus the value; at 0 the error of one step."""
    rewards, values = [np.array([1.0, 0.0, 2.0])], [np.array([0.3, 0.2, 0.1])]
    np.testing.assert_allclose(generalized(rewards, values, 1.0, 1.0)[0], [2.7, 1.8, 1.9])
    np.testing.assert_allclose(generalized(rewards, values, 1.0, 0.0)[0], [0.9, -0.1, 1.9])


def test_masked_tokens_are_not_in_the_trajectory():
    """A tool's answer between two turns changes nothing, whatever the critic thinks of it."""
    plain = token_advantages(PPO, [sample(0, [1, 1, 1], 1.0, [0.1, 0.2, 0.3])])
    with_masked = token_advantages(PPO, [sample(0, [1, 0, 1, 0, 1, 0], 1.0, [0.1, 9.0, 0.2, np.nan, 0.3, 9.0])])
    assert with_masked.advantages[0].tolist() == [x for a in plain.advantages[0].tolist() for x in (a, 0.0)]
    assert plain.returns is not None and with_masked.returns is not None
    assert with_masked.returns[0].tolist() == [x for g in plain.returns[0].tolist() for x in (g, 0.0)]


def test_samples_of_a_rollout_are_one_trajectory():
    """Its reward is the mean of theirs, and is at the last unmasked token of all."""
    whole = token_advantages(PPO, [sample(0, [1, 1, 1, 1], 2.0, [0.1, 0.2, 0.3, 0.4])])
    cut = token_advantages(
        PPO,
        [sample(0, [1, 1], 1.5, [0.1, 0.2]), sample(7, [1], 0.0, [5.0]), sample(0, [1, 1, 0], 2.5, [0.3, 0.4, 0.0])],
    )
    assert np.concatenate([cut.advantages[0], cut.advantages[2][:2]]).tolist() == whole.advantages[0].tolist()
    assert cut.advantages[1].tolist() == [-5.0]


def test_the_kl_is_taken_off_every_tokens_reward():
    loss = LossArguments(advantage_estimator="reinforce_plus_plus", gamma=0.5, kl_coef=0.1, normalize_advantages=False)
    result = token_advantages(loss, [sample(0, [1, 0, 1], 1.0, log_ratio=[2.0, 50.0, -1.0])])
    last = 1.0 + 0.1
    np.testing.assert_allclose(result.advantages[0], [-0.2 + 0.5 * last, 0.0, last], rtol=FEW_ROUNDINGS)
    assert result.metrics["reward_kl"].value == pytest.approx(0.5)
    assert result.returns is None


def test_the_baseline_variant_discounts_nothing():
    loss = LossArguments(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.5)
    result = token_advantages(loss, [sample(0, [1, 1], 0.25, log_ratio=[1.0, 0.0])])
    assert result.advantages[0].tolist() == [-0.25, 0.25]


def test_whitening_is_over_the_tokens_of_the_step():
    loss = LossArguments(advantage_estimator="grpo", normalize_advantages=True)
    result = token_advantages(loss, [sample(0, [1, 1, 0], 1.0), sample(1, [1], -3.0), sample(2, [0], 100.0)])
    advantages = np.array([*result.advantages[0][:2], *result.advantages[1]])
    assert advantages.mean() == pytest.approx(0, abs=FEW_ROUNDINGS)
    assert advantages.std(ddof=1) == pytest.approx(1, rel=FEW_ROUNDINGS)
    assert result.advantages[0][2] == result.advantages[2][0] == 0
    assert result.metrics["advantages"].value == pytest.approx(-1 / 3), "reported as they were before"


def test_equal_advantages_whiten_to_zero():
    assert [c.tolist() for c in whitened([np.array([2.0, 2.0]), np.array([2.0])])] == [[0, 0], [0]]
    assert whitened([np.array([5.0])])[0].tolist() == [0]
    assert whitened([]) == []


@given(st.floats(-1e6, 1e6), st.lists(st.integers(0, 90), min_size=1, max_size=6))
def test_advantages_that_are_equal_up_to_rounding_whiten_to_exactly_zero(number, lengths):
    columns = [number * (1 + 2e-16 * (np.arange(n) % 3)) for n in lengths]
    result = whitened(columns)
    assert [len(column) for column in result] == lengths and not np.concatenate(result).any()


@given(st.floats(-1e4, 1e4), st.integers(0, 2**31), st.sampled_from([1e-3, 1.0, 1e4]))
@example(1e-9, 0, 1e4)
def test_equal_returns_leave_no_variance_to_explain(reward, seed, scale):
    """With lambda 1 the return of every token is the reward, up to the rounding of ``A + V``."""
    rng = np.random.default_rng(seed)
    rows = [rng.normal(0, scale, rng.integers(1, 60)) for _ in range(5)]
    samples = [sample(i, np.ones(len(row)), reward, row) for i, row in enumerate(rows)]
    result = token_advantages(LossArguments(advantage_estimator="ppo"), samples)
    assert "explained_variance" not in result.metrics
    assert result.metrics["returns"].value == pytest.approx(reward, abs=DOUBLE_ERROR * 1e4)
    apart = [replace(samples[0], reward=reward + max(scale, abs(reward)) * 1e-3), *samples[1:]]
    assert "explained_variance" in token_advantages(LossArguments(advantage_estimator="ppo"), apart).metrics


def test_explained_variance():
    """1 for a critic that is right, 0 for a constant one; nothing without variance."""
    loss = LossArguments(advantage_estimator="ppo")
    right = token_advantages(loss, [sample(0, [1, 1], 1.0, [1.0, 1.0]), sample(1, [1], 3.0, [3.0])])
    constant = token_advantages(loss, [sample(0, [1, 1], 1.0, [2.0, 2.0]), sample(1, [1], 3.0, [2.0])])
    assert right.metrics["explained_variance"].value == pytest.approx(1)
    assert constant.metrics["explained_variance"].value == pytest.approx(0)
    assert "explained_variance" not in token_advantages(loss, [sample(0, [1], 1.0, [0.5])]).metrics


def test_a_step_without_a_token_has_no_metrics():
    result = token_advantages(PPO, [sample(0, [0, 0], 1.0, [1.0, 1.0])])
    assert result.metrics == {} and result.advantages[0].tolist() == [0, 0]
    assert token_advantages(PPO, []).advantages == []
