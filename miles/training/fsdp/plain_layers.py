"""Compute norms and rotary positions of Llama, Qwen2 and Qwen3 with few operations on a CPU, forward and backward.

transformers computes an RMS norm with eight operations and rotary positions with five, and autograd twice as many, each
of which passes over all hidden states. Next to bf16 products these passes take a third of the time
(docs/performance.md has the figures). Here their derivatives are written out. On a GPU, transformers' own code runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig, PreTrainedModel

from miles.models.rotary import rotated
from miles.training.packed_attention import NAME, packed_attention

_FAMILIES = ("Llama", "Qwen2", "Qwen3")  # by name: importing the types takes longer
_NORMS = {f"{family}RMSNorm" for family in _FAMILIES}
_ATTENTIONS = {f"{family}Attention" for family in _FAMILIES}


def compute_with_few_operations(model: PreTrainedModel) -> None:
    """Replace the norms and attention modules of the types that are known here, in place.

    While the model has another attention than ``miles_packed``, transformers alone computes it: packing_check.py
    compares the two.
    """
    for module in model.modules():
        if type(module).__name__ in _NORMS:
            module.forward = partial(_norm, module, module.forward, model.config)
        elif type(module).__name__ in _ATTENTIONS:
            module.forward = partial(_attention, module, module.forward)


def _is_ours(hidden_states: torch.Tensor, config: PretrainedConfig) -> bool:
    return hidden_states.is_cpu and config._attn_implementation == NAME


def _norm(
    module: Any, forward: Callable[..., torch.Tensor], config: PretrainedConfig, hidden_states: torch.Tensor
) -> torch.Tensor:
    if not _is_ours(hidden_states, config):
        return forward(hidden_states)
    apply: Callable[..., torch.Tensor] = _RmsNorm.apply
    return apply(hidden_states, module.weight, module.variance_epsilon)


class _RmsNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, rounded where transformers rounds.

    With n = x / sqrt(mean(x^2) + eps) and h = grad * weight, the gradient of x is
    ``(h - n mean(h n)) / sqrt(mean(x^2) + eps)``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype)
        scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return torch.mul(x, scale, out=torch.empty_like(x)) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, along = x * scale, grad * weight
        of_weight = (grad * normed.to(x.dtype)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = torch.linalg.vecdot(normed, along.to(normed.dtype)).div_(x.shape[-1])
        of_x = torch.addcmul(along, normed, mean[..., None], value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


class _Rotated(torch.autograd.Function):
    """Rotary positions of x [B, T, heads, D], for the cosines [B or 1, T, 1, D] and the half of the sines."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotated(grad, cos, sin, direction=-1), None, None


def _attention(
    module: Any,
    forward: Callable[..., tuple[torch.Tensor, None]],
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    past_key_values: None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of an attention module [B, T, H], as its ``forward`` does."""
    if not _is_ours(hidden_states, module.config):
        named = {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        return forward(hidden_states, **named, past_key_values=past_key_values, **kwargs)
    shape = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (p(hidden_states).view(shape) for p in (module.q_proj, module.k_proj, module.v_proj))
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (part[:, :, None] for part in position_embeddings)
    sin = sin[..., : sin.shape[-1] // 2]
    rotate: Callable[..., torch.Tensor] = _Rotated.apply
    query, key, value = (x.transpose(1, 2) for x in (rotate(query, cos, sin), rotate(key, cos, sin), value))
    attended, _ = packed_attention(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.scaling,
        sliding_window=getattr(module, "sliding_window", None),
        **kwargs,
    )
    return module.o_proj(attended.flatten(2)), None
