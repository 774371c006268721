"""Attention sinks (gpt_oss): a learned score per head in the softmax, whose weight goes to no value.

They become a key of their own, so that every attention kernel computes them, with their gradient. Transformers computes
the same (5.19.0 ``gpt_oss/modeling_gpt_oss.py``, ``eager_attention_forward``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_ADDED = 8  # coordinates of a head: two are used; fused kernels on a GPU want multiples of 8


def with_sink(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a key in front, which has the score ``sinks[head]`` and the value 0. Every query must see it.

    Two coordinates are added to queries and keys. For a query, both are the sink of its head. For the new key, they add
    up to ``1 / scaling``: the second is the part that the first loses by rounding.

    Args:
        q: Queries [B, heads, Q, D].
        k: Keys [B, kv_heads, K, D].
        v: Values [B, kv_heads, K, E].
        sinks: [heads].
        scaling: The factor of the scores.

    Returns:
        [B, heads, Q, D + 8], [B, kv_heads, 1 + K, D + 8] and [B, kv_heads, 1 + K, E + 8]. The last 8 coordinates of
        the attention's result are 0.
    """
    import torch  # not at the top: validation reads the files of this folder, and takes no torch
    import torch.nn.functional as F

    width = q.shape[-1]
    of_heads = sinks.to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 2)
    q = F.pad(torch.cat([q, of_heads], -1), (0, _ADDED - 2))
    factor = torch.tensor(1 / scaling, dtype=torch.float64)
    rounded = factor.to(k.dtype)
    sink = k.new_zeros(*k.shape[:2], 1, width + _ADDED)
    sink[..., width] = rounded.item()
    sink[..., width + 1] = (factor - rounded.double()).item()
    k = torch.cat([sink, F.pad(k, (0, _ADDED))], 2)
    return q, k, F.pad(v, (0, _ADDED, 1, 0))
