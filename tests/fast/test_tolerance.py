"""Tolerances are wide enough for this CPU's arithmetic and too narrow for small faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tiny_kinds import config_of
from tiny_llama import tiny_llama
from tolerance import (
    DEVIATION_ERROR,
    DOUBLE_ERROR,
    FEW_ROUNDINGS,
    KIND_LOG_PROB_ERROR,
    RELATIVE_ERROR,
    RUN_ERROR,
    adam_error,
    attention_error,
    digits,
    log_prob_error,
    log_softmax_error,
    places,
    rounding_error,
)
from transformers import AutoModelForCausalLM

TEMPERATURE = 0.8
TOKENS = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))


def log_probs(model: Any) -> torch.Tensor:
    """Return the log-probs of ``TOKENS``, except the first, under ``model``."""
    with torch.no_grad():
        logits = model(input_ids=TOKENS[None]).logits[0] / TEMPERATURE
    return logits.log_softmax(-1)[:-1].gather(1, TOKENS[1:, None])[:, 0]


def largest_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return (actual.double() - expected).abs().max().item()


@pytest.mark.parametrize("spread", [0.15, 0.3, 0.5, 1.0])
def test_a_forward_pass_in_fp32_is_within_tolerance(spread: float) -> None:
    """Test half the tolerance: it is for two computations with independent errors."""
    model = tiny_llama(seed=3, initializer_range=spread)
    tolerance = log_prob_error(model, [TOKENS], TEMPERATURE)
    assert largest_error(log_probs(model), log_probs(deepcopy(model).double())) < tolerance / 2


@pytest.mark.parametrize("terms", [10, 1000, 10_000])
def test_a_sum_term_by_term_is_within_tolerance(terms: int) -> None:
    values = torch.randn(terms, 200, generator=torch.Generator().manual_seed(0))
    partial = torch.zeros(200)
    for value in values:
        partial = partial + value
    exact = values.double().cumsum(0)
    assert largest_error(partial, exact[-1]) <= rounding_error(terms, exact[-1].std().item())


def _in_fp16(model: Any) -> None:
    model.to(torch.float16)


def _with_a_larger_epsilon(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon *= 10  # 1e-5 instead of 1e-6


def _with_one_weight_changed(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 0.01


@pytest.mark.parametrize("spread", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("fault", [_in_fp16, _with_a_larger_epsilon, _with_one_weight_changed])
def test_a_small_fault_exceeds_the_tolerance(fault: Callable[[Any], None], spread: float) -> None:
    model = tiny_llama(seed=3, initializer_range=spread)
    wrong = deepcopy(model)
    fault(wrong)
    expected = log_probs(model.double())
    tolerance = log_prob_error(model, [TOKENS], TEMPERATURE)
    assert largest_error(log_probs(wrong.double()), expected) > 2 * tolerance


def _policy_loss(p: torch.Tensor, old: torch.Tensor, a: torch.Tensor, epsilon: float = 0.0) -> torch.Tensor:
    """Return a loss of each row that has a formula's usual steps: ratios, their product, a gate and a mean."""
    ratio = (p - old).exp() + epsilon
    sequence = (p - old).sum(1, keepdim=True).exp()
    return (-a * ratio - a * sequence**1.5 * (1 - sequence).exp()).mean(1)


def _excess(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative for numbers above 1."""
    return ((actual.double() - expected).abs() / expected.abs().clamp_min(1.0)).max().item()


def test_few_roundings_are_those_of_a_formula_and_no_fault() -> None:
    draw = torch.Generator().manual_seed(0)
    p, old, a = (torch.randn(2000, 5, generator=draw) for _ in range(3))
    old = p + 0.5 * old
    expected = _policy_loss(p.double(), old.double(), a.double())
    assert _excess(_policy_loss(p, old, a), expected) < FEW_ROUNDINGS / 2
    assert _excess(_policy_loss(p, old, a, epsilon=1e-5), expected) > 2 * FEW_ROUNDINGS
    assert _excess(_policy_loss(p.half(), old.half(), a.half()), expected) > 2 * FEW_ROUNDINGS


def test_float64_is_told_from_fp32() -> None:
    values = np.random.default_rng(0).uniform(-9, 9, 1000)
    mean = math.fsum(values) / 1000
    one_by_one = 0.0
    for value in values:
        one_by_one += value / 1000
    assert abs(one_by_one - mean) < DOUBLE_ERROR / 2
    assert abs(float(values.astype(np.float32).mean()) - mean) > 2 * DOUBLE_ERROR


@pytest.mark.parametrize("apart", [0.0, 1e-15, 1e-12, 1e-6, 1.0])
def test_differences_over_deviations_show_another_epsilon(apart: float) -> None:
    values = 9.9 + apart * np.arange(6)

    def in_deviations(epsilon: float) -> np.ndarray:
        return (values - values.mean()) / (values.std(ddof=1) + epsilon)

    exact = [Fraction(value) for value in values]
    centred = [value - sum(exact) / 6 for value in exact]
    deviation = math.sqrt(sum(value * value for value in centred) / 5)
    expected = np.array([float(value) for value in centred]) / (deviation + 1e-6)
    assert abs(in_deviations(1e-6) - expected).max() < DEVIATION_ERROR / 2
    if apart >= 1e-12:
        assert abs(in_deviations(2e-6) - expected).max() > 2 * DEVIATION_ERROR


@pytest.mark.parametrize("spread", [0.5, 2.0, 10.0])
def test_log_probs_of_given_logits_show_another_temperature(spread: float) -> None:
    logits = spread * torch.randn(50, 700, generator=torch.Generator().manual_seed(0))
    expected, tolerance = logits.double().log_softmax(-1), log_softmax_error(logits)
    assert largest_error(logits.log_softmax(-1), expected) < tolerance / 2
    assert largest_error(logits.double().mul(1 + 1e-5).log_softmax(-1), expected) > 2 * tolerance
    assert largest_error(logits.half().double().log_softmax(-1), expected) > 2 * tolerance


def test_attention_shows_a_key_too_few() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 40, 8, generator=draw) for _ in range(3))

    def attend(*inputs: torch.Tensor, scale: float = 0.3) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*inputs, scale=scale)

    exact = q.double(), k.double(), v.double()
    expected, tolerance = attend(*exact), attention_error(q, k, v, scaling=0.3, terms=40)
    assert largest_error(attend(q, k, v), expected) < tolerance / 2
    assert largest_error(attend(q.half(), k.half(), v.half()), expected) > 2 * tolerance
    assert largest_error(attend(*exact, scale=0.3001), expected) > 2 * tolerance
    assert largest_error(attend(exact[0], exact[1][:, :-1], exact[2][:, :-1]), expected) > 2 * tolerance


def _trained(noise: float, dtype: torch.dtype, forgets: bool = False, **options: Any) -> torch.Tensor:
    """Return 10^4 weights after four steps of AdamW; the last two gradients have a relative error of ``noise``."""
    draw = torch.Generator().manual_seed(0)
    weight = (0.15 * torch.randn(10_000, generator=draw)).to(dtype).requires_grad_()
    gradients = 1e-3 * torch.randn(4, 10_000, generator=draw)
    errors = noise * 1e-3 * torch.randn(4, 10_000, generator=draw)
    adam = torch.optim.AdamW([weight], **(dict(lr=1e-2, weight_decay=0.1) | options))
    for step in range(4):
        weight.grad = (gradients[step] + (errors[step] if step >= 2 else 0)).to(dtype)
        if forgets and step == 2:
            adam.state.clear()
        adam.step()
    return weight.detach()


def test_steps_of_adam_show_other_settings_and_lost_moments() -> None:
    expected = _trained(0.0, torch.float64)
    close = adam_error(1e-2, steps=2) + FEW_ROUNDINGS * expected.abs()

    def excess(actual: torch.Tensor) -> float:
        return ((actual.double() - expected).abs() / close).max().item()

    assert excess(_trained(RELATIVE_ERROR / 3, torch.float32)) < 1
    for options in (dict(betas=(0.9, 0.99)), dict(weight_decay=0.09), dict(lr=1.01e-2), dict(forgets=True)):
        assert excess(_trained(0.0, torch.float64, **options)) > 2, options


def test_a_run_shows_another_learning_rate() -> None:
    """One step of a model like the runs': 1 % of the learning rate changes the loss by more than two layouts may."""

    def loss_after(lr: float) -> float:
        model = tiny_llama(seed=3, initializer_range=0.3).double()
        adam = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(2):
            loss = model(input_ids=TOKENS[None], labels=TOKENS[None]).loss
            adam.zero_grad()
            loss.backward()
            adam.step()
        return loss.item()

    assert abs(loss_after(1.01e-3) / loss_after(1e-3) - 1) > 2 * RUN_ERROR


@pytest.mark.parametrize("kind", ["llama", "deepseek_v32", "gpt_oss", "nemotron_h", "qwen3_next"])
def test_the_error_of_all_kinds_is_at_least_that_of_each(kind: str) -> None:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind, initializer_range=0.2))
    assert KIND_LOG_PROB_ERROR / 2 < log_prob_error(model, [TOKENS[:17]], TEMPERATURE) < KIND_LOG_PROB_ERROR


@pytest.mark.parametrize("value", [1.0006, 9.9962, 0.123456])
def test_a_printed_number_is_within_its_digits(value: float) -> None:
    assert float(f"{value:.4g}") == pytest.approx(value, rel=digits(4))
    assert round(value, 3) == pytest.approx(value, abs=places(3))
    assert float(f"{value:.4g}") != pytest.approx(value, rel=digits(6))
