"""Log-probs and entropy when each tensor-parallel rank holds the logits of a part of the vocabulary.

As in objective/token_log_probs.py, positions are processed in chunks and the gradient is written by hand. The ranks
exchange four numbers per position (maximum, sum of exponentials, the target's logit, weighted sum), never logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from miles.objective.token_log_probs import chunked_log_probs, head_logits
from miles.types.support import Support
from miles.types.train_batch import SharedLogits


def vocab_parallel_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    first_token: int,
    temperature: float,
    chunk_size: int,
    group: dist.ProcessGroup,
    with_entropy: bool = False,
    fp32: bool = False,
    support: Support | None = None,
    shared: SharedLogits | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probs of ``targets`` and, if asked, the entropy in nats; fp32 [R], the same on every rank.

    Collective over ``group``. The gradient of ``hidden`` is this rank's part: the caller sums it over ``group``. A
    group of one uses ``miles.objective.token_log_probs.chunked_log_probs``.

    Args:
        hidden: [R, H], or [U, H] for the rows of ``shared``; the same on every rank.
        weight: [v, H], this rank's rows of the head.
        targets: int64 [R], token ids.
        first_token: The token of the first row of ``weight``.
        temperature: Logits are divided by it, unless it is 0.
        chunk_size: Positions computed at a time; all if 0.
        group: The tensor-parallel ranks.
        with_entropy: Whether to return the entropy.
        fp32: Whether the logits are computed in fp32 under a body in bf16.
        support: The sets that the softmax is restricted to, if any; of the whole vocabulary on every rank.
        shared: Which row each response token reads. Ranks that share a vocabulary compute it for each of them.
    """
    if group.size() == 1:
        return chunked_log_probs(
            hidden,
            weight,
            targets,
            temperature,
            chunk_size,
            with_entropy=with_entropy,
            fp32=fp32,
            support=support,
            shared=shared,
        )
    hidden = hidden if shared is None else hidden[shared.row]
    assert len(weight), "every rank must have a token of the vocabulary"
    rows = chunk_size if chunk_size > 0 else max(len(hidden), 1)
    scale = 1.0 / temperature if temperature > 0 else 1.0
    local = targets - first_token
    local = torch.where((local >= 0) & (local < len(weight)), local, -1)  # -1: on another rank
    given = hidden, weight, local, scale, rows, with_entropy, fp32, group, support, first_token
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _VocabParallelLogProbs.apply
    return apply(*given)


class _VocabParallelLogProbs(torch.autograd.Function):
    """Computes log-probs and entropy from sums over the vocabulary.

    With scaled logits z and their maximum m::

        s = sum exp(z - m)     e = sum exp(z - m) (z - m)
        lse = m + log s        log p[target] = z[target] - lse        entropy = log s - e / s
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        local: torch.Tensor,
        scale: float,
        rows: int,
        with_entropy: bool,
        fp32: bool,
        group: dist.ProcessGroup,
        support: Support | None,
        first_token: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        lse, log_probs, entropy = (hidden.new_empty(len(hidden), dtype=dtype) for _ in range(3))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = _logits(hidden[part], weight, scale, fp32)
            if support is not None:
                support.exclude_(logits, part, first_token)
            maximum = logits.amax(1)
            dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
            logits -= maximum[:, None]
            mine = local[part] >= 0
            chosen = logits.gather(1, local[part].clamp_min(0)[:, None])[:, 0] * mine
            exponentials = logits.exp()
            sums = torch.stack([exponentials.sum(1), chosen, torch.linalg.vecdot(exponentials, logits)])
            dist.all_reduce(sums, group=group)
            log_sum = sums[0].log()
            lse[part] = maximum + log_sum
            log_probs[part] = sums[1] - log_sum
            entropy[part] = log_sum - sums[2] / sums[0]
        ctx.save_for_backward(hidden, weight, local, lse, entropy)
        ctx.scale, ctx.rows, ctx.fp32 = scale, rows, fp32
        ctx.support, ctx.first_token = support, first_token
        ctx.set_materialize_grads(False)
        return log_probs, entropy if with_entropy else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, local, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        dtype = lse.dtype if ctx.fp32 else hidden.dtype  # of the products
        head = weight.to(dtype)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            log_p = _logits(hidden[part], weight, ctx.scale, ctx.fp32)
            if ctx.support is not None:
                ctx.support.exclude_(log_p, part, ctx.first_token)
            log_p.sub_(lse[part, None])
            grad = torch.zeros_like(log_p)
            if grad_entropy is not None:
                grad -= grad_entropy[part, None] * (log_p + entropy[part, None])
            if grad_log_probs is not None:
                grad -= grad_log_probs[part, None]
            grad *= log_p.exp_()
            if grad_log_probs is not None:
                mine = local[part] >= 0
                grad.scatter_add_(1, local[part].clamp_min(0)[:, None], (grad_log_probs[part] * mine)[:, None])
            grad = grad.mul_(ctx.scale).to(dtype)
            grad_hidden[part] = grad @ head
            if grad_weight is not None:
                grad_weight += grad.t() @ hidden[part].to(dtype)
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, of_weight, *(None,) * 8


def _logits(hidden: torch.Tensor, weight: torch.Tensor, scale: float, fp32: bool) -> torch.Tensor:
    logits = head_logits(hidden, weight, fp32=fp32).to(torch.promote_types(hidden.dtype, torch.float32))
    return logits if scale == 1.0 else logits.mul_(scale)
