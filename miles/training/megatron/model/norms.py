"""Norms: torch's, because Megatron's wrapper of them refuses sequence parallel, which needs nothing but a mark."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


def mark_sequence_parallel(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the parameters, so that Megatron sums their gradients over ranks that share a sequence."""
    parameter: Any
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm with Megatron's signature."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm with Megatron's signature.

    With ``layernorm_zero_centered_gamma`` the weight is the difference from 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        mark_sequence_parallel(self, config)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized ``input`` [..., hidden]."""
        return F.layer_norm(input, self.normalized_shape, self.weight + self._centre, self.bias, self.eps)
