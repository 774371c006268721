"""Estimators of KL(policy || reference) from one sampled token each (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl"]


def approximate_kl(log_ratio: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimate from ``log_ratio = log policy - log reference`` of tokens sampled from the policy; [R].

    ``k1`` is unbiased and may be negative; ``k2`` is biased, never negative; ``k3`` is unbiased and never negative;
    ``low_var_kl`` is k3 clamped to [-10, 10].
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    k3 = torch.expm1(-log_ratio) + log_ratio
    return k3 if estimator == "k3" else k3.clamp(-10.0, 10.0)
