"""Causal attention over packed sequences, registered with transformers as ``miles_packed``.

Linear layers run on the packed tokens, without padding. For attention alone the tokens are laid out as rows, padded on
the right: a causal query never sees a key to its right, so no mask is needed and the fused kernels apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

NAME = "miles_packed"
SHORT = 512  # tokens of a row up to which the CPU computes attention as two matrix products


@dataclass(frozen=True)
class Rows:
    """Sequences of similar length, padded to the longest.

    ``to_rows`` [S * L] gives for each cell the packed token that stands there, or T (one past the end) for padding.
    ``tokens`` [n] are the packed tokens that occur, each once, and ``to_packed`` [n] a cell in which each stands.
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
    def of(cls, token_index: torch.Tensor, lengths: Sequence[int]) -> PackedLayout:
        """Buckets of sequences in which none is shorter than half the longest, so that at most half is padding.

        ``token_index`` [sum of lengths] says, sequence after sequence, which packed token stands there
        (``MicroBatch``). A packed token of several sequences (a shared prompt) is read by all of them.
        """
        packed = int(token_index.max()) + 1
        sequences = token_index.cpu().split(list(lengths))
        buckets: list[list[torch.Tensor]] = []
        for sequence in sorted(sequences, key=len, reverse=True):
            if not buckets or 2 * len(sequence) < len(buckets[-1][0]):
                buckets.append([])
            buckets[-1].append(sequence)
        return cls(tuple(_rows(bucket, packed, token_index.device) for bucket in buckets))


def _rows(bucket: list[torch.Tensor], packed: int, device: torch.device) -> Rows:
    cells = pad_sequence(bucket, batch_first=True, padding_value=packed)
    used = (cells.flatten() < packed).nonzero()[:, 0]
    tokens, occurrence = cells.flatten()[used].unique(return_inverse=True)
    # Any cell of a token will do, as the attention of a causal prefix is the same in each; the first repeats exactly.
    to_packed = torch.full_like(tokens, cells.numel()).scatter_reduce_(0, occurrence, used, "amin")
    return Rows((len(bucket), cells.shape[1]), cells.flatten().to(device), to_packed.to(device), tokens.to(device))


class _ToRows(torch.autograd.Function):
    """Packed [T, ...] to rows [S * L, ...], zeros for padding. A token sums the gradients of its rows, in fp32."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: Rows) -> torch.Tensor:  # type: ignore[override]
        ctx.rows, ctx.total = rows, x.shape[0]
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[rows.to_rows]

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        out = grad.new_zeros(ctx.total + 1, *grad.shape[1:], dtype=torch.float32 if grad.dtype.itemsize < 4 else None)
        out.index_add_(0, ctx.rows.to_rows, grad.to(out.dtype))
        return out[:-1].to(grad.dtype), None


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
