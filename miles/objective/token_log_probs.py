"""Compute log-probabilities and entropy of a large vocabulary without the whole logits in memory, also backward.

Positions are processed in chunks, whose logits are freed when their results are known. The backward pass computes each
chunk's logits again and their gradient in closed form; only the log-sum-exp and the entropy are kept. A single chunk
keeps its logits too: the backward pass, which begins with them, would need the same memory at the same time.

Response tokens that follow the same tokens (of one prompt, or of responses that begin alike) share a row of logits.

With ``--fp32-lm-head`` the head's product is in fp32 under a body in bf16 (MiniMax-M1, arXiv 2506.13585; ScaleRL, arXiv
2510.13786). Rounding a logit of size 16 to bf16 changes it by up to 1/16, and trainer and engine round
differently.

On a CPU, logits in half precision are converted to fp32 a few rows at once, which stay in the cache of a core. Passes
over all rows of a chunk, one after the other, would wait for memory (docs/performance.md has the figures).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from miles.types.head import head_logits
from miles.types.support import Support
from miles.types.train_batch import SharedLogits

CACHED_BYTES = 1 << 20  # of fp32 logits that fit in a core's cache; 0 leaves chunks whole


def chunked_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    bias: torch.Tensor | None = None,
    with_entropy: bool = False,
    fp32: bool = False,
    support: Support | None = None,
    shared: SharedLogits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs of ``targets`` [R] under softmax(logits / temperature), and its entropy in nats; fp32 [R].

    ``hidden`` [R, H], or [U, H] for the U rows of ``shared``, and ``weight`` [V, H] share a dtype. The logits
    ``hidden @ weight.T + bias`` are computed in this dtype, or in fp32 if ``fp32`` (``head_logits``); everything after
    is fp32. At most ``chunk_size`` rows have their logits in memory, -1 for no limit.
    Temperature 0 (greedy sampling) means the raw logits. Gradients flow to ``hidden``, ``weight`` and ``bias``, from
    both outputs; the gradients of ``weight`` and ``bias`` are accumulated over the chunks in fp32 (fp64 for fp64).

    With ``support``, the softmax is over the tokens of each position's set alone: the distribution that truncated
    sampling draws from (DeepSeek-V3.2, arXiv 2512.02556 §3.1, "Keep Sampling Mask"). Others have no gradient.
    """
    assert support is None or shared is None, "each response token has its own support"
    assert support is None or support.vocab_size <= len(weight), (
        f"sets of {support.vocab_size} tokens, and a head of {len(weight)}"
    )
    assert chunk_size == -1 or chunk_size > 0, f"--log-probs-chunk-size {chunk_size} must be above 0, or -1"
    assert hidden.dtype == weight.dtype, f"hidden is {hidden.dtype}, weight {weight.dtype}"
    rows = chunk_size if chunk_size > 0 else max(len(hidden), 1)
    scale = 1.0 / temperature if temperature > 0 else 1.0
    log_probs, entropy = _ChunkedLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, scale, rows, with_entropy, fp32, support, shared
    )
    return log_probs, entropy if entropy is None or shared is None else entropy[shared.row]


class _ChunkedLogProbs(torch.autograd.Function):
    """The derivatives, with logits z (after scaling), p = softmax(z), log p = z - lse and entropy H = -sum p log p.

    The log-sum-exp lse is kept as ``highest``, the largest logit, and ``shift``, the rest.

    In the backward pass::

        d log p[target] / dz = onehot(target) - p
        d H / dz             = -p (log p + H)

    There is one entropy per row of ``hidden``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        rows: int,
        with_entropy: bool,
        fp32: bool,
        support: Support | None,
        shared: SharedLogits | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        highest = hidden.new_empty(len(hidden), dtype=_accumulate_dtype(hidden))
        shift = torch.empty_like(highest)
        log_probs = highest.new_empty(len(targets))
        entropy = torch.empty_like(highest) if with_entropy else None
        keeps = any(ctx.needs_input_grad) and len(hidden) <= rows
        ctx.stored = None
        for part in _chunks(len(hidden), rows):
            whole, blocks = _logits(hidden[part], weight, bias, fp32)
            for block in blocks:
                rows_at = slice(part.start + block.start, part.start + block.stop)
                logits = _in_fp32(whole[block], scale)
                if support is not None:
                    support.exclude_(logits, rows_at)
                highest[rows_at] = logits.amax(1)
                powers = logits.sub_(highest[rows_at, None]).exp()
                total = powers.sum(1)
                shift[rows_at] = total.log()
                readers, row = _readers(shared, rows_at, targets.device)
                log_probs[readers] = logits[row, targets[readers]] - shift[rows_at][row]
                if entropy is not None:  # from the same exponentials
                    entropy[rows_at] = shift[rows_at] - powers.mul_(logits).sum(1) / total
                if keeps and logits.dtype == whole.dtype:
                    logits.sub_(shift[rows_at, None])
            if keeps:  # log p if they are fp32 or fp64, for they were changed in place; else raw logits
                ctx.stored = whole, blocks
        ctx.save_for_backward(hidden, weight, bias, targets, highest, shift, entropy)
        ctx.scale, ctx.rows, ctx.fp32, ctx.support, ctx.shared = scale, rows, fp32, support, shared
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, highest, shift, entropy = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        dtype = shift.dtype if ctx.fp32 else hidden.dtype  # of the products
        head = weight.to(dtype)
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=shift.dtype) if needs_bias else None
        of_rows = _sum_of_readers(grad_log_probs, ctx.shared, shift)
        cached, ctx.stored = ctx.stored, None  # changed below
        for part in _chunks(len(hidden), ctx.rows):
            whole, blocks = cached or _logits(hidden[part], weight, bias, ctx.fp32)
            for block in blocks:
                rows_at = slice(part.start + block.start, part.start + block.stop)
                if cached is not None and whole.dtype == shift.dtype:
                    log_p = whole[block]
                else:
                    log_p = _in_fp32(whole[block], ctx.scale)
                    if ctx.support is not None:
                        ctx.support.exclude_(log_p, rows_at)
                    log_p.sub_(highest[rows_at, None]).sub_(shift[rows_at, None])
                block_grad = _logits_gradient(
                    log_p,
                    None if of_rows is None else of_rows[rows_at],
                    None if grad_entropy is None else grad_entropy[rows_at],
                    None if entropy is None else entropy[rows_at],
                )
                if grad_log_probs is not None:
                    readers, row = _readers(ctx.shared, rows_at, targets.device)
                    block_grad.index_put_((row, targets[readers]), grad_log_probs[readers], accumulate=True)
                if ctx.scale != 1.0:
                    block_grad.mul_(ctx.scale)
                if grad_bias is not None:
                    grad_bias += block_grad.sum(0)
                if whole.dtype != block_grad.dtype:  # otherwise it was computed in place
                    whole[block] = block_grad
            grad = whole.to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ head
            if needs_weight:
                product = grad.t() @ hidden[part].to(dtype)
                if len(hidden) > len(hidden[part]):  # several chunks are added up in fp32
                    product = product.to(shift.dtype)
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if needs_weight and grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        return (grad_hidden, _cast(grad_weight, weight), _cast(grad_bias, bias), *(None,) * 7)


def _readers(
    shared: SharedLogits | None, rows: slice, device: torch.device
) -> tuple[slice | torch.Tensor, torch.Tensor]:
    """Return the response tokens that read ``rows``, and which of these each of them reads, from 0; int64."""
    if shared is None:
        return rows, torch.arange(rows.stop - rows.start, device=device)
    readers = shared.readers[shared.ends[rows.start] : shared.ends[rows.stop]]
    return readers, shared.row[readers] - rows.start


def _sum_of_readers(
    gradient: torch.Tensor | None, shared: SharedLogits | None, like: torch.Tensor
) -> torch.Tensor | None:
    """Return the gradient of the log-probs that are read from each row, like ``like``."""
    if gradient is None or shared is None:
        return gradient
    return torch.zeros_like(like).index_add_(0, shared.row, gradient)


def _logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, fp32: bool
) -> tuple[torch.Tensor, Sequence[slice]]:
    """Return the logits [rows, V] without scale, and the rows that are worked on at once.

    They are fp32 (fp64 for fp64) if those are all rows.
    """
    logits = head_logits(hidden, weight, bias, fp32)
    dtype = _accumulate_dtype(logits)
    rows = len(logits)
    if logits.dtype != dtype and logits.device.type == "cpu" and CACHED_BYTES:
        rows = max(1, CACHED_BYTES // (logits.shape[1] * dtype.itemsize))
    blocks = list(_chunks(len(logits), max(rows, 1)))
    return (logits if len(blocks) > 1 else logits.to(dtype)), blocks


def _in_fp32(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scaled logits, in place if they are fp32 or fp64 already."""
    logits = logits.to(_accumulate_dtype(logits))
    return logits if scale == 1.0 else logits.mul_(scale)


def _logits_gradient(
    log_p: torch.Tensor,
    grad_log_probs: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    entropy: torch.Tensor | None,
) -> torch.Tensor:
    """Compute ``-g_lp p - g_H p (log p + H)`` as ``p (-g_H log p - g_H H - g_lp)``; [rows, V], in place of ``log_p``.

    The other part of the gradient, ``g_lp onehot``, is the caller's.
    """
    shift = torch.zeros_like(log_p[:, 0])
    if grad_log_probs is not None:
        shift -= grad_log_probs
    if grad_entropy is None:
        return log_p.exp_().mul_(shift[:, None])
    assert entropy is not None
    shift -= grad_entropy * entropy
    p = log_p.exp()
    return log_p.mul_(-grad_entropy[:, None]).add_(shift[:, None]).mul_(p)


def _chunks(length: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, length)) for start in range(0, length, rows))


def _accumulate_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _cast(gradient: torch.Tensor | None, like: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)
