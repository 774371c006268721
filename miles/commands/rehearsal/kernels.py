"""Attention as the fused kernel of a GPU computes it: memory linear in the length of a sequence.

The trace runs on the host, where PyTorch would choose another kernel. The layout of the rows, masks and heads stays
production code (training/packed_attention.py); only the innermost call is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from miles.commands.rehearsal.meter import EXTRA_FLOPS
from miles.objective import token_log_probs
from miles.training import packed_attention


@torch.library.custom_op("miles_rehearsal::attention", mutates_args=())
def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise AssertionError("only fake tensors come here")


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output, and the log-sum-exp of every query that the backward pass reads."""
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("miles_rehearsal::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    raise AssertionError("only fake tensors come here")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pairs: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three gradients, and the fp32 sum that the kernel writes the first to."""
    return (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(q.shape, dtype=torch.float32))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, pairs: int
    ) -> torch.Tensor:
        out: torch.Tensor
        out, lse = _attention(q, k, v, pairs)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.pairs, ctx.mask = pairs, mask  # the backward pass of PyTorch's kernel reads the mask, so it is held
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return (*_attention_backward(grad, *ctx.saved_tensors, ctx.pairs)[:3], None, None)


def _forward_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: int) -> int:
    return 2 * pairs * q.shape[1] * (q.shape[-1] + v.shape[-1])


def _backward_flops(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> int:
    """Count five products: the scores again, and the gradients of scores, queries, keys and values."""
    pairs = int(rest[-1])
    return 2 * pairs * q.shape[1] * (3 * q.shape[-1] + 2 * v.shape[-1])


EXTRA_FLOPS[torch.ops.miles_rehearsal.attention] = _forward_flops
EXTRA_FLOPS[torch.ops.miles_rehearsal.attention_backward] = _backward_flops


@contextmanager
def fused_attention() -> Iterator[None]:
    """Trace attention as a GPU's kernel. It counts the pairs that a causal query sees, not the whole square.

    Logits are worked on as on a GPU too: a whole chunk at a time. So are the rows of short samples, which leave out the
    queries that another row has on a CPU only.
    """
    original, cached = packed_attention._attend, token_log_probs.CACHED_BYTES
    leave_out = packed_attention._without_repeated_queries
    packed_attention._attend, token_log_probs.CACHED_BYTES = _attend, 0
    packed_attention._without_repeated_queries = lambda spans, packed: iter(spans)
    try:
        yield
    finally:
        packed_attention._attend, token_log_probs.CACHED_BYTES = original, cached
        packed_attention._without_repeated_queries = leave_out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, dropout: float, visible: torch.Tensor | None
) -> torch.Tensor:
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if visible is None:
        pairs = q.shape[0] * (queries * keys - queries * (queries - 1) // 2)
    else:
        mask = q.new_zeros(visible.shape)  # PyTorch makes numbers of the scores' dtype of a mask of booleans
        if isinstance(visible, FakeTensor):  # chosen keys: values decide which, and a kernel skips none of the others
            pairs = q.shape[0] * queries * keys
        else:
            with unset_fake_temporarily():
                pairs = int(visible.sum()) * (q.shape[0] // visible.shape[0])
    out: torch.Tensor = _Attention.apply(q, k, v, mask, pairs)  # type: ignore[no-untyped-call]
    return out
