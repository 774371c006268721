"""Token advantages and the gradients of critic and policy do not depend on how the step is split."""

from __future__ import annotations

import pytest
from cases import BATCHES, FULL, LAYOUTS, MODES, Case, loss_of, without_loss_tokens
from compare import differences, gradient_differences
from critic_oracle import expected_step, off_policy_with_values
from quick_pairs import quick_pairs

SPLITS = ["alone, packed", "dp2", "cp2, packed", "dp2 x cp2", "dynamic cp, 4 ranks"]
PPO = dict(advantage_estimator="ppo", gamma=0.9, lambd=0.8)
OTHERS = {
    "returns": dict(advantage_estimator="reinforce_plus_plus", gamma=0.9, normalize_advantages=True),
    "baseline": dict(advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True),
    "whitened groups": dict(advantage_estimator="grpo", normalize_advantages=True),
}
KL = dict(kl_coef=0.3, kl_loss_type="k3")


def assert_conforms(case: Case, ranks, oracle) -> None:
    (result,) = ranks.run(case)
    expected = expected_step(case, oracle)
    assert differences(result, expected.gradients, expected.metrics) == []
    assert gradient_differences(result.critic_gradients, expected.critic_gradients) == []


@pytest.mark.parametrize(("mode", "layout"), quick_pairs(MODES, SPLITS))
def test_policy_and_critic(ranks, oracle, mode, layout):
    """Test on-policy, and with old values on both sides of the clip, a KL in the reward, and whitening."""
    batch = BATCHES["masked" if mode in ("sample_mean", "constant") else "compacted"]
    assert_conforms(Case(batch, loss_of(mode, **PPO), LAYOUTS[layout], shuffled=True), ranks, oracle)
    loss = loss_of(mode, **PPO, **KL, value_clip=0.15, normalize_advantages=True, entropy_coef=0.01)
    case = off_policy_with_values(Case(batch, loss, LAYOUTS[layout], seed=3), oracle)
    assert 0 < expected_step(case, oracle).metrics["value_clipfrac"] < 1
    assert_conforms(case, ranks, oracle)


@pytest.mark.parametrize(("batch", "layout"), quick_pairs(["uneven", "compacted"], ["alone, packed", "dp2 x cp2"]))
@pytest.mark.parametrize("estimator", OTHERS)
def test_estimators_without_a_critic(ranks, oracle, estimator, batch, layout):
    kl = {} if estimator == "whitened groups" else KL
    case = Case(BATCHES[batch], loss_of("sample_mean", **OTHERS[estimator], **kl), LAYOUTS[layout], watch=True)
    assert_conforms(off_policy_with_values(case, oracle), ranks, oracle)


@pytest.mark.parametrize("layout", ["alone", "dp2 x cp2"])
def test_a_kl_in_the_loss_works_with_a_critic(ranks, oracle, layout):
    case = Case(BATCHES["uneven"], loss_of("sample_mean", **PPO, **FULL), LAYOUTS[layout])
    assert_conforms(off_policy_with_values(case, oracle), ranks, oracle)


@pytest.mark.parametrize("layout", ["alone", "dp2, packed", "cp2"])
def test_a_step_without_a_token_is_skipped(ranks, layout):
    spec = without_loss_tokens(BATCHES["uneven"])
    (result,) = ranks.run(Case(spec, loss_of("sample_mean", **PPO, normalize_advantages=True), LAYOUTS[layout]))
    assert result.metrics == {"skipped_steps": 1, "critic_skipped_steps": 1}
    assert not any(g.any() for g in result.critic_gradients.values())
