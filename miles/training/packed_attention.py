"""Causal attention over packed or padded sequences, registered with transformers as ``miles_packed``.

Linear layers run on the packed tokens, without padding. For attention alone the tokens are laid out as rows, padded on
the right: a causal query never sees a key to its right, so no mask is needed and the fused kernels apply.

Under context parallelism a rank holds the zig-zag chunks of every sequence. It gathers the keys and values of the
others, and its two chunks of queries each attend to the part of the sequence that ends with them.

In a padded micro-batch the tokens are such rows already.

A layer with a sliding window of W keys attends in its own rows: W queries, and the 2 W - 1 keys that they may see.
So neither time nor memory grows with the square of a sequence's length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from miles.batch.collate import to_device
from miles.models.attention_sinks import with_sink
from miles.types.groups import ALONE, ContextGroup
from miles.types.parallel import padded_length, zigzag_chunks
from miles.types.train_batch import MicroBatch

NAME = "miles_packed"
SHORT = 128  # keys of a row up to which attention is computed with its scores in memory
CACHED_BYTES = 1 << 20  # of fp32 scores that fit in a core's cache


@dataclass(frozen=True)
class _Span:
    """Consecutive queries, and the keys from the first that one of them sees to the last query."""

    queries: np.ndarray  # int64 [Q], into this rank's packed axis
    keys: np.ndarray  # int64 [K], into the packed axes of all ranks

    @property
    def first(self) -> int:
        """The index of the first query among the keys."""
        return len(self.keys) - len(self.queries)


@dataclass(frozen=True)
class PackedRows:
    """Spans of similar length as rows, padded on the right to the longest.

    ``queries`` and ``keys`` have the token of each cell, or one past the last token for padding. ``tokens`` [n] are the
    packed tokens that occur as queries, each once; ``to_packed`` [n] is a cell of the queries that holds each, and
    ``keys_to_packed`` [n] the cell of the keys at the same position. ``visible`` states which key a query sees, in each
    row or in all; None if that is causal, with the last query at the last key.
    """

    query_shape: tuple[int, int]  # rows, Q
    key_shape: tuple[int, int]  # rows, K
    queries: torch.Tensor  # int64 [rows * Q]
    keys: torch.Tensor  # int64 [rows * K]
    to_packed: torch.Tensor
    keys_to_packed: torch.Tensor
    tokens: torch.Tensor
    visible: torch.Tensor | None  # bool [rows or 1, 1, Q, K]

    @property
    def is_short(self) -> bool:
        """Whether scores of these rows are best kept in memory: on a CPU, with few keys."""
        return self.queries.device.type == "cpu" and self.key_shape[1] <= SHORT

    def of_queries(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` [T, ...] as rows of queries, [rows, Q, ...]; padding is zero."""
        return _to_rows(tokens, self.queries).view(*self.query_shape, *tokens.shape[1:])

    def of_keys(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` [T, ...] as rows of keys, [rows, K, ...]; padding is zero."""
        return _to_rows(tokens, self.keys).view(*self.key_shape, *tokens.shape[1:])

    def put(self, computed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return ``out`` [T, ...] with the tokens of ``computed`` [rows, Q, ...] at their positions."""
        return out.index_copy(0, self.tokens, computed.flatten(0, 1)[self.to_packed])

    def put_from_keys(self, computed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Do the same with ``computed`` [rows, K, ...], by a layer that has computed the rows of keys."""
        return out.index_copy(0, self.tokens, computed.flatten(0, 1)[self.keys_to_packed])


@dataclass(frozen=True)
class _Sequences:
    """What rows are made from, as the arguments of ``PackedLayout.of_packed``."""

    token_index: np.ndarray
    lengths: Sequence[int]
    device: torch.device
    tokens: int  # of all ranks


class PackedLayout:
    """How the tokens of one micro-batch become rows. Built once per micro-batch, used by every layer.

    No dataclass: FSDP2 would look for tensors with a gradient in all of its fields, twice per layer.
    """

    def __init__(
        self,
        rows: tuple[PackedRows, ...],
        context: ContextGroup,
        padded: bool = False,
        sequences: _Sequences | None = None,
    ) -> None:
        self.rows = rows
        self.context = context
        self.padded = padded  # the tokens are rows already
        self.sequences = sequences  # of layers that may have a window
        self._rows_of_window: dict[int | None, tuple[PackedRows, ...]] = {} if padded else {None: rows}
        self._short_cells: dict[tuple[int | None, int, int], _ShortCells | None] = {}

    @classmethod
    def of(cls, micro: MicroBatch) -> PackedLayout:
        """Build the layout of a micro-batch, packed or padded."""
        device, tokens = micro.input_ids.device, micro.input_ids.numel()
        if micro.padded:
            lengths = [tokens // micro.rows] * micro.rows
            return cls((), micro.context, padded=True, sequences=_Sequences(np.arange(tokens), lengths, device, tokens))
        return cls.of_packed(micro.token_index.numpy(), micro.read_lengths, device, micro.context, tokens)

    @classmethod
    def of_packed(
        cls,
        token_index: np.ndarray,
        lengths: Sequence[int],
        device: torch.device,
        context: ContextGroup = ALONE,
        tokens: int | None = None,
    ) -> PackedLayout:
        """Put spans into buckets in which no span is shorter than half the longest, so that at most half is padding.

        A packed token of several sequences (in a shared prompt, say) is read by all of them. Long spans that do not
        start at the first token get a bucket of their own: fused kernels have no mask but the causal one.

        Args:
            token_index: the packed token at each position, sequence after sequence, padded for ``context``; as in
                ``MicroBatch``. It is on the host, so that a GPU that is still busy is not waited for.
            lengths: of the sequences, without padding.
            device: of the layout's tensors.
            context: the ranks that share the sequences.
            tokens: of this rank's packed axis, with padding at its end; None: as many as ``token_index`` names.
        """
        everywhere = int(token_index.max()) + 1 if tokens is None else tokens * context.size
        sequences = _Sequences(token_index, lengths, device, everywhere)
        return cls(_rows_of(sequences, context, None), context, sequences=sequences)

    def narrowed(self, window: int | None) -> int | None:
        """Return ``window``, or None if the longest sequence fits into it."""
        if window is None:
            return None
        assert self.sequences is not None, "layers that choose keys have no window"
        return None if window >= max(self.sequences.lengths) else window

    def rows_within(self, window: int | None) -> tuple[PackedRows, ...]:
        """Return the rows of a layer whose queries see the last ``window`` keys, their own included; None: all.

        They are built for the first layer that needs them.
        """
        assert self.sequences is not None, "narrowed() comes first"
        if window not in self._rows_of_window:
            self._rows_of_window[window] = _rows_of(self.sequences, self.context, window)
        return self._rows_of_window[window]

    def short_cells(self, window: int | None, heads: int, kv_heads: int) -> _ShortCells | None:
        """Return the cells of the short rows of ``rows_within``; None if there are none."""
        if self.sequences is None or self.sequences.device.type != "cpu":
            return None
        key = window, heads, kv_heads
        if key not in self._short_cells:
            rows = [part for part in self.rows_within(window) if part.is_short]
            everywhere = self.sequences.tokens
            tokens = everywhere // self.context.size
            self._short_cells[key] = _ShortCells.of(rows, tokens, everywhere, heads, kv_heads) if rows else None
        return self._short_cells[key]


def _rows_of(sequences: _Sequences, context: ContextGroup, window: int | None) -> tuple[PackedRows, ...]:
    """Put spans into buckets, as ``PackedLayout.of_packed`` states. With a window, its spans share a mask."""
    everywhere = sequences.tokens
    packed = everywhere // context.size
    spans = _spans(sequences.token_index, sequences.lengths, context)
    if window is not None:
        spans = (part for span in spans for part in _within(span, window))
    elif context.size == 1 and sequences.device.type == "cpu":
        spans = _without_repeated_queries(spans, packed)

    def order(span: _Span) -> tuple[int, int]:
        if window is not None:
            return span.first, len(span.keys)
        return len(span.queries) if context.size == 1 else 0, len(span.keys)

    def may_join(bucket: list[_Span], span: _Span) -> bool:
        first = bucket[0]
        if window is not None:
            masks_agree = span.first == first.first
        else:
            masks_agree = len(first.keys) <= SHORT or (context.size == 1 and not span.first)
        return masks_agree and _are_alike(first, bucket[-1], span)

    buckets: list[list[_Span]] = []
    for span in sorted(spans, key=order, reverse=True):
        if not buckets or not may_join(buckets[-1], span):
            buckets.append([])
        buckets[-1].append(span)
    return tuple(_rows(bucket, packed, everywhere, sequences.device, window) for bucket in buckets)


def _are_alike(first: _Span, last: _Span, span: _Span) -> bool:
    """Return whether ``span`` has half the queries of ``first`` or more, and none of the three twice another's keys."""
    lengths = [len(first.keys), len(last.keys), len(span.keys)]
    return 2 * len(span.queries) >= len(first.queries) and 2 * min(lengths) >= max(lengths)


def _without_repeated_queries(spans: Iterable[_Span], packed: int) -> Iterator[_Span]:
    """Leave out the queries of short spans that an earlier span has too: those that samples begin with.

    The scores of short spans are in memory anyway, with a mask; the kernels for long ones have the causal mask alone.
    """
    is_done = np.zeros(packed, bool)
    for span in spans:
        repeated = is_done[span.queries]
        is_done[span.queries] = True
        if len(span.keys) > SHORT:
            yield span
        elif not repeated.all():
            yield _Span(span.queries[repeated.argmin() :], span.keys)


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


def _within(span: _Span, window: int) -> Iterator[_Span]:
    """Cut a span into parts of at most ``window`` queries, with the keys that one of them sees."""
    for start in range(0, len(span.queries), window):
        queries = span.queries[start : start + window]
        first = span.first + start
        yield _Span(queries, span.keys[max(0, first - window + 1) : first + len(queries)])


def _rows(bucket: list[_Span], packed: int, everywhere: int, device: torch.device, window: int | None) -> PackedRows:
    queries = _padded([span.queries for span in bucket], packed)
    keys = _padded([span.keys for span in bucket], everywhere)
    used = np.flatnonzero(queries.ravel() < packed)
    # Any cell of a token will do, as the attention of a causal prefix is the same in each; the first repeats exactly.
    tokens, first = np.unique(queries.ravel()[used], return_index=True)
    row, place_in_row = np.divmod(used[first], queries.shape[1])
    place_of_first = np.array([span.first for span in bucket])
    of_keys = row * keys.shape[1] + place_of_first[row] + place_in_row
    visible = _visible(place_of_first, queries.shape[1], keys.shape[1], window)
    return PackedRows(
        (len(bucket), queries.shape[1]),
        (len(bucket), keys.shape[1]),
        to_device(queries.ravel(), device),
        to_device(keys.ravel(), device),
        to_device(used[first], device),
        to_device(of_keys, device),
        to_device(tokens, device),
        None if visible is None else to_device(visible, device),
    )


def _visible(place_of_first: np.ndarray, queries: int, keys: int, window: int | None) -> np.ndarray | None:
    """Return ``PackedRows.visible`` of rows whose first query is at ``place_of_first`` [rows]."""
    are_late = place_of_first.any()
    if window is None:
        needs_mask = are_late and (len(place_of_first) > 1 or keys <= SHORT)
    else:
        needs_mask = are_late or keys > window
    if not needs_mask:
        return None
    starts = place_of_first[:1] if (place_of_first == place_of_first[0]).all() else place_of_first
    place = starts[:, None, None] + np.arange(queries)[:, None]
    visible = np.arange(keys) <= place
    if window is not None:
        visible &= np.arange(keys) > place - window
    return visible[:, None]


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
    """Return the cells of ``queries`` or ``keys``, [cells, ...], of ``tokens`` [T, ...]; padding is zero."""
    apply: Callable[..., torch.Tensor] = _ToRows.apply
    return apply(tokens, index)


# Attention over short rows on a CPU: all rows of a layer in one function, whose backward is written out.
#
# PyTorch's fused kernel has a slow backward, so two products with the scores in memory are several times faster on rows
# of 54 tokens (benchmarks/packed_attention.py). Autograd's operations would take most of the time around the products:
# here rows are gathered, and their gradients added up, once for all buckets. The scores of a few rows at a time stay in
# a core's cache.


@dataclass(frozen=True)
class _Block:
    """Rows of one bucket that are computed together: their cells, and what is added to their scores."""

    queries: slice  # of all cells of queries
    keys: slice  # of all cells of keys
    batch: int  # rows times key heads
    mask: torch.Tensor  # fp32 [1, M, K] or [batch, M, K], M = Q * heads / kv_heads: 0 if a query sees a key, else -inf


@dataclass(frozen=True)
class _ShortCells:
    """The cells of short rows: row after row, in it key head after key head, in it token after token.

    Cells of queries have the heads that share a key head. Tokens without a cell of queries read the one past the last,
    which is zero.
    """

    queries: torch.Tensor  # int64 [cells of queries], into [T * kv_heads]
    keys: torch.Tensor  # int64 [cells of keys], into [S * kv_heads], S: tokens of all ranks
    of_tokens: torch.Tensor  # int64 [T * kv_heads], into the cells of queries
    readers: torch.Tensor  # int64, cells of keys sorted by token; without padding
    ends: torch.Tensor  # int64 [S * kv_heads + 1], into ``readers``
    blocks: tuple[_Block, ...]

    @classmethod
    def of(cls, rows: Sequence[PackedRows], tokens: int, everywhere: int, heads: int, kv_heads: int) -> _ShortCells:
        """Lay out ``rows`` of T ``tokens``, whose keys are of the S tokens ``everywhere``."""
        of_heads = torch.arange(kv_heads)
        queries, keys, blocks = [], [], []
        of_tokens = torch.full((tokens, kv_heads), sum(part.queries.numel() for part in rows) * kv_heads)
        first_query = first_key = 0
        for part in rows:
            count, length = part.query_shape
            width = part.key_shape[1]
            row, place = part.to_packed // length, part.to_packed % length
            of_tokens[part.tokens] = first_query + (row[:, None] * kv_heads + of_heads) * length + place[:, None]
            queries.append(_cells_of_heads(part.queries.view(count, length), kv_heads))
            keys.append(_cells_of_heads(part.keys.view(count, width), kv_heads))
            mask = _mask_of_heads(part, heads // kv_heads)
            step = max(1, CACHED_BYTES // (4 * heads * length * width))
            for start in range(0, count, step):
                batch = min(step, count - start) * kv_heads
                of_block = mask if len(mask) == 1 else mask[start : start + step].repeat_interleave(kv_heads, 0)
                query_cells = slice(first_query, first_query + batch * length)
                key_cells = slice(first_key, first_key + batch * width)
                blocks.append(_Block(query_cells, key_cells, batch, of_block))
                first_query, first_key = query_cells.stop, key_cells.stop
        of_keys = torch.cat(keys)
        readers = of_keys.argsort(stable=True)
        ends = torch.searchsorted(of_keys[readers], torch.arange(everywhere * kv_heads + 1))
        return cls(
            torch.cat(queries).clamp(max=tokens * kv_heads - 1),  # padding: any token
            of_keys.clamp(max=everywhere * kv_heads - 1),
            of_tokens.view(-1),
            readers[: ends[-1]],
            ends,
            tuple(blocks),
        )


def _cells_of_heads(tokens: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the index of each key head of ``tokens`` [rows, n] among [T * kv_heads], head after head in each row."""
    return (tokens[:, None] * kv_heads + torch.arange(kv_heads)[:, None]).flatten()


def _mask_of_heads(rows: PackedRows, sharers: int) -> torch.Tensor:
    """Return what is added to the scores [1 or rows, Q * sharers, K] of ``rows``."""
    visible = rows.visible
    if visible is None:
        shape = rows.query_shape[1], rows.key_shape[1]
        visible = torch.ones(shape, dtype=torch.bool).tril(shape[1] - shape[0])[None, None]
    mask = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)
    return mask[:, 0].repeat_interleave(sharers, 1)


class _ShortAttention(torch.autograd.Function):
    """Attend in short rows: q [T, heads, D], k [S, kv_heads, D], v [S, kv_heads, E] to [T, heads, E].

    Tokens that are in no row get zeros. The products have the dtype of ``q``; scores are rounded to it, and scaled and
    normalized in fp32 (fp64 for fp64). A key sums the gradients of its cells in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: _ShortCells, scaling: float
    ) -> torch.Tensor:
        tokens, heads, _ = q.shape
        q, k, v = q.reshape(tokens * k.shape[1], -1), k.reshape(-1, k.shape[2]), v.reshape(-1, v.shape[2])
        rows = q.index_select(0, cells.queries), k.index_select(0, cells.keys), v.index_select(0, cells.keys)
        sharers = q.shape[1] // k.shape[1]
        out = q.new_empty(len(cells.queries) + 1, sharers * v.shape[1])
        out[-1] = 0
        precise = torch.promote_types(q.dtype, torch.float32)
        shares = []
        for block in cells.blocks:
            bq, bk, bv = _of_block(block, *rows)
            scores = torch.bmm(bq, bk.mT)
            share = torch.add(block.mask.to(precise), scores, alpha=scaling).softmax(-1)
            torch.bmm(share.to(v.dtype), bv, out=_view(out, block.queries, block.batch, v.shape[1]))
            shares.append(share)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(*rows, *shares)
        ctx.cells, ctx.scaling, ctx.sharers, ctx.shape = cells, scaling, sharers, (tokens, heads)
        return out.index_select(0, cells.of_tokens).view(tokens, heads, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *shares = ctx.saved_tensors
        cells: _ShortCells = ctx.cells
        of_out = q.new_zeros(len(q) + 1, ctx.sharers * v.shape[1])
        of_out.index_copy_(0, cells.of_tokens, grad.reshape(len(cells.of_tokens), -1))
        of_q, of_k, of_v = q.new_zeros(len(q) + 1, q.shape[1]), torch.empty_like(k), torch.empty_like(v)
        for block, share in zip(cells.blocks, shares, strict=True):
            bq, bk, bv = _of_block(block, q, k, v)
            bg = _view(of_out, block.queries, block.batch, v.shape[1])
            torch.bmm(share.to(v.dtype).mT, bg, out=_view(of_v, block.keys, block.batch, v.shape[1]))
            of_shares = torch.bmm(bg, bv.mT).to(share.dtype)
            # A hidden key has a share of 0, and so no gradient.
            of_scores = torch._softmax_backward_data(of_shares, share, -1, share.dtype)
            of_products = of_scores.mul_(ctx.scaling).to(q.dtype)
            torch.bmm(of_products, bk, out=_view(of_q, block.queries, block.batch, k.shape[1]))
            torch.bmm(of_products.mT, bq, out=_view(of_k, block.keys, block.batch, k.shape[1]))
        kv_heads = len(cells.of_tokens) // ctx.shape[0]
        # A query is in the cell that its result is read from; in others its gradient is 0.
        grad_q = of_q.index_select(0, cells.of_tokens).view(*ctx.shape, -1)
        grad_k, grad_v = (_sum_of_readers(part, cells).view(-1, kv_heads, part.shape[1]) for part in (of_k, of_v))
        return grad_q, grad_k, grad_v, None, None


def _view(cells: torch.Tensor, part: slice, batch: int, width: int) -> torch.Tensor:
    """Return the part as [batch, n, width]."""
    return cells[part].view(batch, -1, width)


def _of_block(
    block: _Block, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows of a block: [batch, M, D], [batch, K, D] and [batch, K, E]."""
    keys = _view(k, block.keys, block.batch, k.shape[1]), _view(v, block.keys, block.batch, v.shape[1])
    return _view(q, block.queries, block.batch, k.shape[1]), *keys


def _sum_of_readers(gradient: torch.Tensor, cells: _ShortCells) -> torch.Tensor:
    """Return the sum of the gradients of each token's cells, [S * kv_heads, D], added up in fp32."""
    return torch.embedding_bag(gradient, cells.readers, cells.ends, mode=0, include_last_offset=True)[0]


def _short_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: _ShortCells, scaling: float
) -> torch.Tensor:
    """Return attention in the rows of ``cells``, [T, heads, E], with zeros for tokens of other rows."""
    apply: Callable[..., torch.Tensor] = _ShortAttention.apply
    return apply(q, k, v, cells, scaling)


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


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    scaling: float,
    dropout: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in rows: q [rows, heads, Q, D], k and v [rows, kv_heads, K, D]; returns q's shape with the width of v."""
    if sinks is None:
        return _fused_attention(q, k, v, scaling, dropout, visible)
    if visible is not None:
        visible = F.pad(visible, (1, 0), value=True)
    return _fused_attention(*with_sink(q, k, v, sinks, scaling), scaling, dropout, visible)[..., : v.shape[-1]]


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
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    indices: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend in packed sequences: query [1, heads, T, D], key and value [1, kv_heads, T, D] to [1, T, heads, D].

    In padded ones they are [rows, heads, S, D] and so on: a causal query sees no padding, which is to its right.
    There, ``indices`` [rows, S, n] may name the only keys that each query sees (sparse attention of fsdp/models.py);
    if n is 0, it sees all.

    A query sees the last ``sliding_window`` keys, its own included, or all if that is None. ``s_aux`` [heads] are
    attention sinks (models/attention_sinks.py).

    Raises:
        ValueError: for scores that are capped (``softcap``), which would silently be computed otherwise; and for a
            model whose layers do not pass keyword arguments on, such as Nemotron's in transformers.
    """
    if packed is None:
        raise ValueError(
            "the attention of this model does not receive the layout of its samples; --train-backend fsdp trains "
            "models whose layers pass keyword arguments on to it; choose another model"
        )
    if softcap is not None:
        raise ValueError(
            "this model caps the scores of its attention, which --train-backend fsdp does not compute; choose another "
            "model"
        )

    window = packed.narrowed(sliding_window)
    if indices is not None and not indices.shape[-1]:
        indices = None
    is_plain = s_aux is None and dropout == 0.0 and indices is None
    cells = packed.short_cells(window, query.shape[1], key.shape[1]) if is_plain else None

    attend = partial(_attend, scaling=scaling, dropout=dropout, sinks=s_aux)
    if packed.padded and window is None and cells is None:
        visible = None if indices is None else _chosen(indices, key.shape[2])
        return attend(query, key, value, visible).transpose(1, 2).contiguous(), None
    assert indices is None, "the model chooses keys in rows"
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [T, heads, D]
    if packed.context.size > 1:  # keys and values of all ranks, in one exchange
        k, v = packed.context.gather(torch.cat([k, v], -1)).split([k.shape[-1], v.shape[-1]], -1)
    out = q.new_zeros(*q.shape[:2], v.shape[-1]) if cells is None else _short_attention(q, k, v, cells, scaling)
    for rows in packed.rows_within(window):
        if cells is None or not rows.is_short:
            qr, kr, vr = (part.transpose(1, 2) for part in (rows.of_queries(q), rows.of_keys(k), rows.of_keys(v)))
            out = rows.put(attend(qr, kr, vr, rows.visible).transpose(1, 2), out)
    return out.view(*query.shape[:1], -1, *out.shape[1:]), None


def _chosen(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return which keys a query sees, bool [rows, 1, S, keys]: keys of ``indices`` that are not after it."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    return chosen.scatter(-1, indices.long(), True).tril()[:, None]


AttentionInterface.register(NAME, packed_attention)
