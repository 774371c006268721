"""Attention over short rows in half precision on a CPU: a few rows at a time, whose fp32 scores stay in a core's cache.

Computing the scores of all rows at once takes a few passes over memory that was just allocated, which is slower than
the two matrix products (docs/performance.md has the figures).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CACHED_BYTES = 1 << 20  # of fp32 scores that fit in a core's cache


def cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, visible: torch.Tensor | None
) -> torch.Tensor:
    """Attend in rows: q [rows, heads, Q, D], k [rows, kv_heads, K, D], v [rows, kv_heads, K, E] to [rows, heads, Q, E].

    The products have the dtype of ``q``; scores are rounded to it, and scaled and normalized in fp32.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        scaling: The factor of the scores.
        visible: Which keys a query sees, bool [rows or 1, 1, Q, K]; None: causal, with the last query at the last key.
    """
    if visible is None:
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])[None, None]
    hidden = ~visible.repeat(1, 1, q.shape[1] // k.shape[1], 1)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    apply: Callable[..., torch.Tensor] = _CachedAttention.apply
    return apply(q, k, v, hidden, scaling, learns)


class _CachedAttention(torch.autograd.Function):
    """Heads that share a key head are rows of one product: q [rows, kv_heads, M, D] with M = heads / kv_heads * Q."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        hidden: torch.Tensor,
        scaling: float,
        learns: bool,
    ) -> torch.Tensor:
        rows, heads, length, width = q.shape
        q = q.reshape(rows, k.shape[1], heads // k.shape[1] * length, width)
        shares = q.new_empty(*q.shape[:3], k.shape[2], dtype=torch.float32) if learns else None
        out = q.new_empty(*q.shape[:3], v.shape[3])
        for block in _blocks(q, k):
            scores = (q[block] @ k[block].transpose(-1, -2)).float().mul_(scaling)
            scores.masked_fill_(hidden[block] if len(hidden) > 1 else hidden, -torch.inf)
            share = torch.softmax(scores, -1)
            out[block] = share.to(v.dtype) @ v[block]
            if shares is not None:
                shares[block] = share
        ctx.save_for_backward(q, k, v, shares)
        ctx.scaling, ctx.shape = scaling, (rows, heads, length, width)
        return out.reshape(rows, heads, length, v.shape[3])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, shares = ctx.saved_tensors
        grad = grad.reshape(*q.shape[:3], v.shape[3])
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for block in _blocks(q, k):
            grad_v[block] = shares[block].to(v.dtype).transpose(-1, -2) @ grad[block]
            of_shares = (grad[block] @ v[block].transpose(-1, -2)).float()
            # A hidden key has a share of 0, and so no gradient.
            of_scores = torch._softmax_backward_data(of_shares, shares[block], -1, torch.float32)
            of_products = of_scores.mul_(ctx.scaling).to(q.dtype)
            grad_q[block] = of_products @ k[block]
            grad_k[block] = (q[block].transpose(-1, -2) @ of_products).transpose(-1, -2)
        return grad_q.reshape(ctx.shape), grad_k, grad_v, None, None, None


def _blocks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    scores = q.shape[1] * q.shape[2] * k.shape[2]  # of one row
    step = max(1, CACHED_BYTES // (4 * max(1, scores)))
    return (slice(start, start + step) for start in range(0, len(q), step))
