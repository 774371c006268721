"""VAPO's lambda by length, and returns of the critic's own lambda, against 2504.05118 token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tolerance import FEW_ROUNDINGS

from miles.config.explain import explain
from miles.config.parser import parse
from miles.config.validate import validate
from miles.objective.chosen import build_objective
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages

NUMBERS = st.floats(-3, 3)
ROWS = st.lists(st.lists(NUMBERS, min_size=1, max_size=40), min_size=1, max_size=4)


def gae(reward, values, gamma, lambd):
    """The double sum, of a reward at the end."""
    rewards, following = [0.0] * (len(values) - 1) + [reward], [*values[1:], 0.0]
    delta = [r + gamma * f - v for r, f, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lambd) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@given(ROWS, st.floats(0.5, 1), st.floats(0, 1), st.sampled_from(["vapo", "ppo"]))
def test_advantages_and_returns_have_their_own_lambda(rows, gamma, critic_lambd, name):
    own = dict(vapo_alpha=0.1) if name == "vapo" else dict(lambd=0.3)
    loss = LossArguments(advantage_estimator=name, gamma=gamma, critic_lambd=critic_lambd, **own)
    samples = [SampleTokens(i, float(i), np.ones(len(v)), np.array(v)) for i, v in enumerate(rows)]
    result = token_advantages(build_objective(loss), samples)
    assert result.returns is not None
    for i, values in enumerate(rows):
        lambd = max(0.0, 1 - 1 / (0.1 * len(values))) if name == "vapo" else 0.3
        expected = gae(float(i), values, gamma, lambd)
        returns = [a + v for a, v in zip(gae(float(i), values, gamma, critic_lambd), values, strict=True)]
        np.testing.assert_allclose(result.advantages[i], expected, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)
        np.testing.assert_allclose(result.returns[i], returns, rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS)


def test_by_default_the_critic_of_vapo_learns_the_reward_and_that_of_ppo_a_plus_v():
    values = np.array([0.5, 0.25, 0.75])
    by_name = {}
    for name in ("vapo", "ppo"):
        loss = LossArguments(advantage_estimator=name, **({"lambd": 0.5} if name == "ppo" else {}))
        by_name[name] = token_advantages(build_objective(loss), [SampleTokens(0, 2.0, np.ones(3), values)])
    assert by_name["vapo"].returns is not None and by_name["ppo"].returns is not None
    np.testing.assert_allclose(by_name["vapo"].returns[0], [2.0] * 3)
    np.testing.assert_allclose(by_name["ppo"].returns[0], by_name["ppo"].advantages[0] + values, rtol=FEW_ROUNDINGS)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--advantage-estimator vapo --vapo-alpha 0", "--vapo-alpha 0.0: .*above 0"),
        ("--advantage-estimator vapo --critic-lambd 2", "--critic-lambd 2.0: .* 0 to 1"),
    ],
)
def test_refused(command, flags, message):
    with pytest.raises(ValueError, match=message):
        validate(parse(f"{command} {flags}".split()))


def test_explained(command):
    text = explain(validate(parse(f"{command} --advantage-estimator vapo".split())))
    assert "λ = max(0, 1 - 1 / (0.05 l))" in text and "the critic's return" in text and "estimators/vapo.py" in text
    text = explain(validate(parse(f"{command} --advantage-estimator ppo --critic-lambd 0.9".split())))
    assert "G_t = V_t + Σ_k (1 · 0.9)^k δ_(t+k)" in text
