"""Causal attention over packed sequences, registered with transformers as ``miles_packed``.

Linear layers run on the packed tokens, without padding. For attention alone the tokens are laid out as rows, padded on
the right: a causal query never sees a key to its right, so no mask is needed and the fused kernels apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

NAME = "miles_packed"
SHORT = 512  # tokens of a row up to which the CPU computes attention as two matrix products


@dataclass(frozen=True)
class Rows:
    """Sequences of similar length, padded to the longest.

    ``to_rows`` [S * L] gives for each cell the packed token that stands there, or T (one past the end) for padding;
    ``to_packed`` [n] gives for each of these sequences' tokens its cell, in packed order; ``tokens`` [n] which tokens.
    """

    shape: tuple[int, int]
    to_rows: torch.Tensor
    to_packed: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class PackedLayout:
    """How the packed tokens of one micro-batch become rows. Built once a micro-batch, used by every layer."""

    rows: tuple[Rows, ...]

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Buckets of sequences in which none is shorter than half the longest, so that at most half is padding."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        total = int(starts[-1])
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        buckets: list[list[int]] = []
        for i in order:
            if not buckets or 2 * lengths[i] < lengths[buckets[-1][0]]:
                buckets.append([])
            buckets[-1].append(i)
        return cls(tuple(_rows(bucket, lengths, starts, total, device) for bucket in buckets))


def _rows(bucket: list[int], lengths: Sequence[int], starts: torch.Tensor, total: int, device: torch.device) -> Rows:
    longest = lengths[bucket[0]]
    cell = torch.arange(longest)
    length = torch.tensor([lengths[i] for i in bucket])[:, None]
    token = starts[torch.tensor(bucket)][:, None] + cell
    used = cell < length
    to_rows = torch.where(used, token, total).flatten()
    return Rows(
        (len(bucket), longest), to_rows.to(device), used.flatten().nonzero()[:, 0].to(device), token[used].to(device)
    )


class _ToRows(torch.autograd.Function):
    """Packed [T, ...] to rows [S * L, ...], zeros for padding. A gather both ways, as each token has one cell."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: Rows) -> torch.Tensor:  # type: ignore[override]
        ctx.rows, ctx.total = rows, x.shape[0]
        return _gather_or_zero(x, rows.to_rows)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        out = grad.new_zeros(ctx.total, *grad.shape[1:])
        out[ctx.rows.tokens] = grad[ctx.rows.to_packed]
        return out, None


def _gather_or_zero(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[index]


def _short_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """Causal attention as two matrix products, for rows so short that the scores are small.

    PyTorch's fused CPU kernel has a slow backward: on rows of 54 tokens this is several times faster
    (benchmarks/packed_attention.py). Heads that share a key head become rows of one product; the softmax is fp32.
    """
    rows, heads, length, width = q.shape
    shared = heads // k.shape[1]
    scores = q.reshape(rows, k.shape[1], shared * length, width) @ k.transpose(-1, -2)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1).repeat(shared, 1)
    scores = (scores.float() * scaling).masked_fill_(future, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).reshape(q.shape)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv_heads, T, D] of packed sequences; returns [1, T, heads, D].

    Raises ``ValueError`` for a layer with a sliding window: it would be attended in full, silently.
    """
    if sliding_window is not None:
        raise ValueError(
            "this model has sliding-window attention; --train-backend fsdp trains full-attention models only"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    out = q.new_zeros(q.shape)
    for rows in packed.rows:
        qr, kr, vr = (_ToRows.apply(x, rows).view(*rows.shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        if query.device.type == "cpu" and rows.shape[1] <= SHORT and dropout == 0.0:
            o = _short_attention(qr, kr, vr, scaling)
        else:
            o = F.scaled_dot_product_attention(
                qr, kr, vr, is_causal=True, dropout_p=dropout, scale=scaling, enable_gqa=qr.shape[1] != kr.shape[1]
            )
        out = out.index_copy(0, rows.tokens, o.transpose(1, 2).flatten(0, 1)[rows.to_packed])
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, packed_attention)
