"""Causal attention over packed or padded sequences, registered with transformers as ``miles_packed``.

Linear layers run on the packed tokens, without padding. For attention alone the tokens are laid out as rows, padded on
the right: a causal query never sees a key to its right, so no mask is needed and the fused kernels apply.

Under context parallelism a rank holds the zig-zag chunks of every sequence. It gathers the keys and values of the
others, and its two chunks of queries each attend to the part of the sequence that ends with them.

In a padded micro-batch the tokens are such rows already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from miles.batching.collate import to_device
from miles.parallel.context_parallel import padded_length, zigzag_chunks
from miles.parallel.groups import ALONE, ContextGroup
from miles.train_batch import MicroBatch
from miles.training.cpu.cached_attention import cached_attention

NAME = "miles_packed"
SHORT = 128  # keys of a row up to which attention is computed with its scores in memory


@dataclass(frozen=True)
class _Span:
    """Consecutive queries, and the keys from the start of their sequence to the last query."""

    queries: np.ndarray  # int64 [Q], into this rank's packed axis
    keys: np.ndarray  # int64 [K], into the packed axes of all ranks

    @property
    def first(self) -> int:
        """The position of the first query."""
        return len(self.keys) - len(self.queries)


@dataclass(frozen=True)
class Rows:
    """Spans of similar length as rows, padded on the right to the longest.

    ``queries`` and ``keys`` have the token of each cell, or one past the last token for padding. ``tokens`` [n] are the
    packed tokens that occur, each once, and ``to_packed`` [n] is a cell that holds each. ``visible`` says which key a
    query sees; None if that is causal, with the last query at the last key.
    """

    query_shape: tuple[int, int]  # rows, Q
    key_shape: tuple[int, int]  # rows, K
    queries: torch.Tensor  # int64 [rows * Q]
    keys: torch.Tensor  # int64 [rows * K]
    to_packed: torch.Tensor
    tokens: torch.Tensor
    visible: torch.Tensor | None  # bool [rows, 1, Q, K]

    def of_queries(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` [T, ...] as rows of queries, [rows, Q, ...]; padding is zero."""
        return _to_rows(tokens, self.queries).view(*self.query_shape, *tokens.shape[1:])

    def of_keys(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` [T, ...] as rows of keys, [rows, K, ...]; padding is zero."""
        return _to_rows(tokens, self.keys).view(*self.key_shape, *tokens.shape[1:])

    def put(self, computed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return ``out`` [T, ...] with the tokens of ``computed`` [rows, Q, ...] at their places."""
        return out.index_copy(0, self.tokens, computed.flatten(0, 1)[self.to_packed])


@dataclass(frozen=True)
class PackedLayout:
    """How the tokens of one micro-batch become rows. Built once per micro-batch, used by every layer."""

    rows: tuple[Rows, ...]
    context: ContextGroup
    padded: bool = False  # the tokens are rows already

    @classmethod
    def of(cls, micro: MicroBatch) -> PackedLayout:
        """Build the layout of a micro-batch, packed or padded."""
        if micro.padded:
            return cls((), micro.context, padded=True)
        return cls.of_packed(micro.token_index.numpy(), micro.total_lengths, micro.input_ids.device, micro.context)

    @classmethod
    def of_packed(
        cls, token_index: np.ndarray, lengths: Sequence[int], device: torch.device, context: ContextGroup = ALONE
    ) -> PackedLayout:
        """Put spans into buckets in which none is shorter than half the longest, so that at most half is padding.

        A packed token of several sequences (a shared prompt) is read by all of them. Long spans that do not start at
        the first token get a bucket of their own: fused kernels have no mask but the causal one.

        Args:
            token_index: the packed token at each position, sequence after sequence, padded for ``context``; as in
                ``MicroBatch``. It is on the host, so that a GPU that is still busy is not waited for.
            lengths: of the sequences, without padding.
            device: of the layout's tensors.
            context: the ranks that share the sequences.
        """
        buckets: list[list[_Span]] = []
        for span in sorted(_spans(token_index, lengths, context), key=lambda span: len(span.keys), reverse=True):
            alone = context.size > 1 and buckets and len(buckets[-1][0].keys) > SHORT
            if not buckets or alone or 2 * len(span.keys) < len(buckets[-1][0].keys):
                buckets.append([])
            buckets[-1].append(span)
        everywhere = int(token_index.max()) + 1
        packed = everywhere // context.size
        return cls(tuple(_rows(bucket, packed, everywhere, device) for bucket in buckets), context)


def _spans(token_index: np.ndarray, lengths: Sequence[int], context: ContextGroup) -> Iterator[_Span]:
    ends = np.cumsum([padded_length(length, context.size) for length in lengths])
    start = 0
    for sequence in np.split(token_index[: ends[-1]], ends[:-1]):
        if context.size == 1:
            yield _Span(sequence, sequence)
            continue
        chunk = len(sequence) // (2 * context.size)
        for half, number in enumerate(zigzag_chunks(context.size, context.rank)):
            mine = start + half * chunk + np.arange(chunk)
            yield _Span(mine, sequence[: (number + 1) * chunk])
        start += 2 * chunk


def _rows(bucket: list[_Span], packed: int, everywhere: int, device: torch.device) -> Rows:
    queries = _padded([span.queries for span in bucket], packed)
    keys = _padded([span.keys for span in bucket], everywhere)
    used = np.flatnonzero(queries.ravel() < packed)
    # Any cell of a token will do, as the attention of a causal prefix is the same in each; the first repeats exactly.
    tokens, first = np.unique(queries.ravel()[used], return_index=True)
    visible = None
    if any(span.first for span in bucket) and (len(bucket) > 1 or keys.shape[1] <= SHORT):
        position = np.array([span.first for span in bucket])[:, None] + np.arange(queries.shape[1])
        visible = (np.arange(keys.shape[1]) <= position[:, :, None])[:, None]
    return Rows(
        (len(bucket), queries.shape[1]),
        (len(bucket), keys.shape[1]),
        to_device(queries.ravel(), device),
        to_device(keys.ravel(), device),
        to_device(used[first], device),
        to_device(tokens, device),
        None if visible is None else to_device(visible, device),
    )


def _padded(parts: list[np.ndarray], value: int) -> np.ndarray:
    """Return ``parts`` as rows, padded on the right with ``value``."""
    rows = np.full((len(parts), max(map(len, parts))), value, np.int64)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


class _ToRows(torch.autograd.Function):
    """Tokens [T, ...] to cells [cells, ...], zeros for padding. A token sums the gradients of its cells, in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
        ctx.cells, ctx.total = cells, x.shape[0]
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])])[cells]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_zeros(ctx.total + 1, *grad.shape[1:], dtype=torch.float32 if grad.dtype.itemsize < 4 else None)
        out.index_add_(0, ctx.cells, grad.to(out.dtype))
        return out[:-1].to(grad.dtype), None


def _to_rows(tokens: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the cells of ``Rows.queries`` or ``Rows.keys``, [cells, ...], of ``tokens`` [T, ...]; padding is zero."""
    apply: Callable[..., torch.Tensor] = _ToRows.apply
    return apply(tokens, index)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, dropout: float, visible: torch.Tensor | None
) -> torch.Tensor:
    """Attend in rows: q [rows, heads, Q, D], k and v [rows, kv_heads, K, D]; returns q's shape with the width of v."""
    if q.device.type == "cpu" and k.shape[2] <= SHORT and dropout == 0.0:
        return _short_attention(q, k, v, scaling, visible)
    return _fused_attention(q, k, v, scaling, dropout, visible)


def _short_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, visible: torch.Tensor | None
) -> torch.Tensor:
    """Compute attention as two matrix products, for rows so short that the scores are small.

    PyTorch's fused CPU kernel has a slow backward: on rows of 54 tokens this is several times faster
    (benchmarks/packed_attention.py). Heads that share a key head become rows of one product; the softmax is fp32. In
    half precision the same is done a few rows at a time (cpu/cached_attention.py).
    """
    rows, heads, length, width = q.shape
    groups = k.shape[1]
    if q.dtype.itemsize < 4:
        return cached_attention(q, k, v, scaling, visible)
    scores = q.reshape(rows, groups, heads // groups * length, width) @ k.transpose(-1, -2)
    if visible is None:
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()[None, None]
    hidden = ~visible.repeat(1, 1, heads // groups, 1)
    scores = (scores.float() * scaling).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1).to(v.dtype) @ v).reshape(rows, heads, length, v.shape[-1])


def _fused_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float, dropout: float, visible: torch.Tensor | None
) -> torch.Tensor:
    """Call PyTorch's kernel. Without ``visible``, queries fewer than the keys are the last of them."""
    causal = q.shape[2] == k.shape[2] and visible is None
    if visible is None and not causal:
        visible = causal_lower_right(q.shape[2], k.shape[2])
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=causal, dropout_p=dropout, scale=scaling, enable_gqa=gqa
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedLayout | None = None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    indices: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend in packed sequences: query [1, heads, T, D], key and value [1, kv_heads, T, D] to [1, T, heads, D].

    In padded ones they are [rows, heads, S, D] and so on: a causal query sees no padding, which is to its right.
    There, ``indices`` [rows, S, n] may name the only keys that each query sees (fsdp/sparse_attention.py); if n is 0,
    it sees all.

    Raises:
        ValueError: for a layer with a sliding window, which would silently be attended in full; and for a model whose
            layers do not pass keyword arguments on, such as Nemotron's in transformers.
    """
    if packed is None:
        raise ValueError(
            "the attention of this model does not receive the layout of its samples; --train-backend fsdp trains "
            "models whose layers pass keyword arguments on to it"
        )
    if sliding_window is not None:
        raise ValueError(
            "this model has sliding-window attention; --train-backend fsdp trains full-attention models only"
        )
    if packed.padded:
        visible = None if indices is None or not indices.shape[-1] else _chosen(indices, key.shape[2])
        return _attend(query, key, value, scaling, dropout, visible).transpose(1, 2), None
    assert indices is None, "the model chooses keys in rows"
    q = query[0].transpose(0, 1)  # [T, heads, D]
    width = key.shape[-1]
    both = packed.context.gather(torch.cat([key, value], -1)[0].transpose(0, 1))  # of all ranks, one exchange
    out = q.new_zeros(*q.shape[:2], value.shape[-1])
    for rows in packed.rows:
        qr = rows.of_queries(q).transpose(1, 2)
        kr, vr = rows.of_keys(both).transpose(1, 2).split([width, both.shape[-1] - width], -1)
        o = _attend(qr, kr, vr, scaling, dropout, rows.visible)
        out = rows.put(o.transpose(1, 2), out)
    return out.unsqueeze(0), None


def _chosen(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return which keys a query sees, bool [rows, 1, S, keys]: those of ``indices`` that are not after it."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return chosen.scatter(-1, indices.long(), True).tril()[:, None]


AttentionInterface.register(NAME, packed_attention)
