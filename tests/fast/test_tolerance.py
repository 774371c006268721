"""Tolerances are wide enough for fp32 on this CPU and too narrow for small faults."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny_llama import tiny_llama
from tolerance import log_prob_error, rounding_error

TEMPERATURE = 0.8
TOKENS = torch.randint(64, (60,), generator=torch.Generator().manual_seed(1))


def log_probs(model: Any) -> torch.Tensor:
    """Return the log-probs of ``TOKENS``, except the first, under ``model``."""
    with torch.no_grad():
        logits = model(input_ids=TOKENS[None]).logits[0] / TEMPERATURE
    return logits.log_softmax(-1)[:-1].gather(1, TOKENS[1:, None])[:, 0]


def largest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.double() - expected).abs().max().item()


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
