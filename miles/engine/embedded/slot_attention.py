"""Attention over the engine's own KV cache, registered with transformers as ``miles_slots``.

The step that a forward pass takes (prefill or decode) travels through the model as the keyword argument ``kv_step``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from miles.engine.embedded.kv_cache import KVCache

NAME = "miles_slots"


@dataclass(frozen=True)
class PrefillStep:
    """Whole prompts, padded on the right: a causal query never sees the padding, so no mask is needed.

    ``prompt_of_row`` [R]: which prompt of this pass is stored in row ``first_row + i``, for each of R new rows.
    """

    cache: KVCache
    prompt_of_row: torch.Tensor
    first_row: int

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        self.cache.write_prompts(layer, key, value, self.prompt_of_row, self.first_row)
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


@dataclass(frozen=True)
class DecodeStep:
    """The next token of rows 0 .. B - 1, at ``positions`` [B]. ``mask`` [B, 1, 1, width]: 0 to there, then -inf."""

    cache: KVCache
    rows: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        width = self.mask.shape[-1]
        keys, values = self.cache.append(layer, key, value, self.rows, self.positions, width)
        # The query heads that share a key head stand as its query positions: keys are read once and never repeated.
        grouped = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask, scale=scale)
        return out.reshape(len(query), query.shape[1], 1, -1)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kv_step: PrefillStep | DecodeStep,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, T, D], key and value [B, kv_heads, T, D] of this pass's tokens; returns [B, T, heads, D].

    Raises ``ValueError`` for a layer that is not plain full attention: it would be computed wrongly, silently.
    """
    features = {
        "sliding window": sliding_window,
        "soft-capped logits": softcap,
        "attention sinks": s_aux,
        "position bias": position_bias,
    }
    present = [name for name, value_ in features.items() if value_ is not None]
    if present:
        raise ValueError(
            f"--rollout-engine torch: layer {module.layer_idx} of the model has {' and '.join(present)}; the embedded "
            "engine runs decoder-only models with plain full attention: choose one with --hf-checkpoint"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    return kv_step.attend(layer, query, key, value, scaling).transpose(1, 2), None


AttentionInterface.register(NAME, slot_attention)
