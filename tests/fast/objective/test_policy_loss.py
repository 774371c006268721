"""Clipping against a plain formula, and what of the loss follows the aggregation mode."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerance import DOUBLE_ERROR, FEW_ROUNDINGS

from miles.objective.chosen import build_objective
from miles.objective.kl import approximate_kl, masked_log_ratio
from miles.objective.loss_types import policy_loss
from miles.objective.loss_types.sft_loss import sft_loss_function
from miles.objective.output import LossOutput, reported
from miles.objective.policy_losses.ppo_clip import ClipFlags, clipped_losses
from miles.objective.settings import LossArguments

MASKS = [[1, 1], [1, 0, 1], [1, 1, 1, 1]]
SIZE = 9


def policy_loss_function(loss, micro, log_probs, entropy) -> LossOutput:
    return policy_loss.policy_loss_function(build_objective(loss), micro, log_probs, entropy)


def samples_with_gradient(loss: LossArguments, advantages: list[float]) -> list[bool]:
    return build_objective(loss).samples_with_gradient(advantages)


def plain_loss(ratio: float, advantage: float, low: float, high: float, bound: float | None) -> float:
    """The objective to maximize as PPO and dual clip write it, negated."""
    objective = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if advantage < 0 and bound is not None:
        objective = max(objective, bound * advantage)
    return -objective


@given(
    log_ratio=st.floats(-3, 3),
    advantage=st.floats(-5, 5),
    low=st.floats(0.01, 0.9),
    high=st.none() | st.floats(0.01, 2.0),
    bound=st.none() | st.floats(1.1, 5.0),
)
def test_clipping_is_the_plain_formula(log_ratio, advantage, low, high, bound):
    flags = ClipFlags(low, high, bound)
    losses, clipped = clipped_losses(torch.tensor([log_ratio]), torch.tensor([advantage]), flags)
    top = low if high is None else high
    ratio = math.exp(log_ratio)
    assert losses.item() == pytest.approx(plain_loss(ratio, advantage, low, top, bound), rel=FEW_ROUNDINGS)
    if abs(advantage) > 1e-3 and min(abs(ratio - 1 + low), abs(ratio - 1 - top)) > 1e-3:
        binds = ratio > 1 + top if advantage > 0 else ratio < 1 - low
        assert bool(clipped.item()) == binds


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "flows"), [(1.0, 1.0, False), (1.0, -1.0, True), (-1.0, -1.0, False)]
)
def test_gradient_stops_where_clipped(log_ratio, advantage, flows):
    x = torch.tensor([log_ratio], requires_grad=True)
    clipped_losses(x, torch.tensor([advantage]), ClipFlags(0.2)).losses.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(-advantage * math.exp(log_ratio) if flows else 0.0)


def test_huge_ratios_stay_finite():
    log_probs = torch.tensor([0.0, 0.0], requires_grad=True)
    log_ratio = masked_log_ratio(log_probs, torch.tensor([-500.0, 500.0]), torch.ones(2))
    clipped_losses(log_ratio, torch.zeros(2), ClipFlags(0.2)).losses.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [0.0, 0.0]


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=8))
def test_kl_estimators(log_ratios):
    x = torch.tensor(log_ratios, dtype=torch.float64)
    assert approximate_kl(x, "k1").tolist() == x.tolist()
    assert torch.allclose(approximate_kl(x, "k2"), x**2 / 2)
    assert torch.allclose(approximate_kl(x, "k3"), torch.exp(-x) - 1 + x, rtol=DOUBLE_ERROR, atol=DOUBLE_ERROR)
    assert (approximate_kl(x, "k3") >= 0).all()
    assert torch.equal(approximate_kl(x, "low_var_kl"), approximate_kl(x, "k3").clamp(-10, 10))


def test_k3_is_an_unbiased_kl_of_two_categoricals():
    p, q = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.5, 0.3, 0.2]).double()
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert torch.allclose((p * approximate_kl((p / q).log(), estimator)).sum(), exact)


@pytest.fixture
def micro(make_micro):
    generator = torch.Generator().manual_seed(1)
    old, ref, rollout, advantages = torch.randn(4, SIZE, generator=generator).unbind()
    return make_micro(
        MASKS,
        old_log_probs=0.3 * old,
        ref_log_probs=0.3 * ref,
        rollout_log_probs=0.3 * rollout,
        advantages=advantages,
        sample_denoms=torch.tensor([5.0, 5.0, 9.0]),
        num_trajectories=4,
        num_loss_tokens=20,
    )


def random_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    log_probs, entropy = torch.randn(2, SIZE, generator=generator).unbind()
    return (0.3 * log_probs).requires_grad_(), entropy.abs().requires_grad_()


def test_the_terms_add_up_and_have_their_gradients(micro):
    loss = LossArguments(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2", entropy_coef=0.25)
    log_probs, entropy = random_inputs()
    output = policy_loss_function(loss, micro, log_probs, entropy)
    output.loss.backward()
    m = {name: value.item() for name, value in output.metrics.items()}
    assert m["loss"] == pytest.approx(m["pg_loss"] - 0.25 * m["entropy_loss"] + 0.5 * m["kl_loss"], abs=FEW_ROUNDINGS)
    assert all(not value.requires_grad and value.dim() == 0 for value in output.metrics.values())

    counts = torch.tensor([2.0, 2.0, 4.0])[micro.sample_index]
    weights = micro.loss_mask / counts / 4
    assert micro.old_log_probs is not None and micro.ref_log_probs is not None
    assert m["ppo_kl"] == pytest.approx(((micro.old_log_probs - log_probs) * weights).sum().item(), abs=FEW_ROUNDINGS)
    drift = (micro.old_log_probs - micro.rollout_log_probs).abs()
    assert m["train_rollout_logprob_abs_diff"] == pytest.approx((drift * weights).sum().item(), abs=FEW_ROUNDINGS)
    torch.testing.assert_close(entropy.grad, -0.25 * weights)
    assert log_probs.grad is not None
    pg_only = policy_loss_function(LossArguments(), micro, log_probs, entropy).loss
    kl_gradient = log_probs.grad - torch.autograd.grad(pg_only, log_probs)[0]
    torch.testing.assert_close(kl_gradient, 0.5 * weights * (log_probs - micro.ref_log_probs).detach())


@pytest.mark.parametrize(
    ("mode", "rescoped"),
    [("prompt_mean", {"loss", "pg_loss"}), ("constant", {"loss", "pg_loss"}), ("token_mean", None)],
)
def test_only_pg_loss_follows_the_mode(micro, mode, rescoped):
    loss = LossArguments(use_kl_loss=True)
    default = policy_loss_function(loss, micro, *random_inputs()).metrics
    moved = replace(loss, loss_aggregation=mode, calculate_per_token_loss=mode == "token_mean")  # as validation does
    other = policy_loss_function(moved, micro, *random_inputs()).metrics
    changed = {name for name in default if default[name] != other[name]}
    assert changed == (rescoped or set(default))


def test_kl_with_coefficient_zero_is_measured_only(micro):
    log_probs, entropy = random_inputs()
    plain = policy_loss_function(LossArguments(), micro, log_probs, entropy)
    measured = policy_loss_function(LossArguments(use_kl_loss=True), micro, log_probs, entropy)
    gradients = [torch.autograd.grad(o.loss, log_probs)[0] for o in (plain, measured)]
    assert torch.equal(*gradients)
    assert measured.metrics["kl_loss"] != 0 and "kl_loss" not in plain.metrics


def test_without_old_log_probs_the_ratio_is_one_and_the_gradient_the_policy_gradient(micro):
    log_probs, _ = random_inputs()
    output = policy_loss_function(LossArguments(), replace(micro, old_log_probs=None), log_probs, None)
    output.loss.backward()
    weights = micro.loss_mask / torch.tensor([2.0, 2.0, 4.0])[micro.sample_index] / 4
    torch.testing.assert_close(log_probs.grad, -micro.advantages * weights)
    assert output.metrics["pg_clipfrac"] == 0 == output.metrics["ppo_kl"]
    assert "entropy_loss" not in output.metrics


COLUMNS = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")


@pytest.mark.parametrize("columns", [COLUMNS, *((name,) for name in COLUMNS), ()], ids="+".join)
def test_nothing_masked_is_read(micro, columns):
    """NaN under the mask, in one column, in all, or in the policy's own numbers, changes no number and no gradient."""
    loss = LossArguments(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.1)
    masked = micro.loss_mask == 0

    def run(poison: float) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
        own = poison if len(columns) != 1 else 0.0
        log_probs, entropy = (x.detach().masked_fill(masked, own).requires_grad_() for x in random_inputs())
        dirty = replace(micro, **{name: getattr(micro, name).masked_fill(masked, poison) for name in columns})
        output = policy_loss_function(loss, dirty, log_probs, entropy)
        output.loss.backward()
        return output.metrics, log_probs.grad

    (clean, clean_grad), (dirty, dirty_grad) = run(0.0), run(float("nan"))
    torch.testing.assert_close(dirty, clean)
    torch.testing.assert_close(dirty_grad, clean_grad)


def test_an_empty_micro_batch_reports_the_same_names_as_a_full_one(micro, make_micro):
    loss = LossArguments(use_kl_loss=True, kl_loss_coef=0.1, loss_aggregation="prompt_mean")
    full = policy_loss_function(loss, micro, *random_inputs())
    none = torch.zeros(0)
    empty = make_micro([], old_log_probs=none, ref_log_probs=none, total_lengths=(1,), num_trajectories=4)
    log_probs = none.clone().requires_grad_()
    output = policy_loss_function(loss, empty, log_probs, none)
    output.loss.backward()
    assert set(output.metrics) == set(full.metrics)
    assert all(value == 0 for value in output.metrics.values())


@pytest.mark.parametrize("per_token", [False, True])
def test_answers_that_are_not_trained_on_do_not_lower_the_effective_sample_size(make_micro, per_token):
    """As --mask-truncated-completions leaves them; a float64 (sum w)^2 / (n sum w^2) over the tokens that count."""
    log_ratios = [0.5, -1.0, 0.25]
    engine = torch.tensor([*log_ratios, 9.0, 9.0]).neg()
    micro = make_micro([[1, 1, 1], [0, 0], []], rollout_log_probs=engine)
    loss = LossArguments(calculate_per_token_loss=per_token)
    sums = {
        name: value.item() for name, value in policy_loss_function(loss, micro, torch.zeros(5), None).metrics.items()
    }
    weights = [math.exp(x) for x in log_ratios]
    wanted = sum(weights) ** 2 / (3 * sum(w * w for w in weights))
    metrics = reported(sums, micro, per_token)
    assert metrics["ess_ratio"].value == pytest.approx(wanted, rel=FEW_ROUNDINGS)
    assert not {"is_ratio_square", "is_ratio_weight"} & set(metrics)


def test_sft_is_the_mean_negative_log_likelihood(micro):
    log_probs, _ = random_inputs()
    loss = LossArguments(loss_aggregation="token_mean", calculate_per_token_loss=True)
    output = sft_loss_function(loss, micro, log_probs)
    output.loss.backward()
    expected = -(log_probs * micro.loss_mask).sum().item() / 20
    assert output.metrics["loss"].item() == pytest.approx(expected, abs=FEW_ROUNDINGS)
    torch.testing.assert_close(log_probs.grad, -micro.loss_mask / 20)


@pytest.mark.parametrize("estimator", ["ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_estimates_by_token_give_every_sample_a_gradient(estimator):
    """The advantage of a reward of 0 is not known before the critic, the KL and the whitening."""
    assert samples_with_gradient(LossArguments(advantage_estimator=estimator), [0.0, 1.0]) == [True, True]
    assert samples_with_gradient(LossArguments(normalize_advantages=True), [0.0, 1.0]) == [True, True]
    assert samples_with_gradient(LossArguments(loss_type="value_loss"), [0.0]) == [True]
    assert samples_with_gradient(LossArguments(), [0.0, 1.0]) == [False, True]


@pytest.mark.parametrize(
    "term",
    [
        dict(entropy_coef=0.1),
        dict(entropy_coef=-0.1),
        dict(use_kl_loss=True, kl_loss_coef=0.1),
        dict(custom_pg_loss_reducer_function_path="mine:reducer"),
    ],
    ids=lambda given: " ".join(given),
)
def test_another_term_gives_every_sample_a_gradient(term):
    assert samples_with_gradient(LossArguments(**term), [0.0, 1.0]) == [True, True]


def test_only_an_advantage_of_exactly_zero_has_no_gradient():
    measured = LossArguments(use_kl_loss=True)  # with coefficient 0 the KL is only measured
    assert samples_with_gradient(measured, [0.0, 0.5, -0.5, -1e-9]) == [False, True, True, True]
