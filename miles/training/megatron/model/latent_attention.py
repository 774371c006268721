"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1) under miles' layout of tokens.

Keys and values of all heads are made of one narrow vector per token, queries of another; the rotated part of a key is
the same in every head. Without Transformer Engine, Megatron's own layer cuts the matrices of the narrow vectors over
the tensor-parallel ranks, and the gradient of the rotated part stays that of a rank's own heads. Here every rank has
these matrices whole, and applies them to its part of the sequence. Names of parameters are Megatron's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import MLATransformerConfig

from miles.training.megatron.model.norms import RMSNorm, mark_sequence_parallel
from miles.training.megatron.model.packed_tokens import PackedCoreAttention, PackedTokens

LATENT_EPSILON = 1e-6  # of the norms inside attention: in transformers this number, whatever the config's rms_norm_eps


class WholeLinear(torch.nn.Linear):
    """A matrix that every tensor-parallel rank has whole."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class LatentAttention(MegatronModule):
    """The attention of one layer, on this rank's heads."""

    def __init__(
        self,
        config: MLATransformerConfig,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp = pg_collection.tp
        self.heads = config.num_attention_heads // self.tp.size()
        self.widths = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        plain, rotated, value = self.widths
        everywhere = config.num_attention_heads
        if config.q_lora_rank is None:
            self.linear_q_proj = self._columns(config.hidden_size, everywhere * (plain + rotated))
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, LATENT_EPSILON)
            self.linear_q_up_proj = self._columns(config.q_lora_rank, everywhere * (plain + rotated))
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, config.kv_lora_rank + rotated)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, LATENT_EPSILON)
        self.linear_kv_up_proj = self._columns(config.kv_lora_rank, everywhere * (plain + value))
        self.rotary_factor, score_factor = yarn_factors(config)
        self.core_attention = PackedCoreAttention(
            config,
            layer_number,
            AttnMaskType.causal,
            "self",
            softmax_scale=score_factor / math.sqrt(plain + rotated),
        )
        self.linear_proj = RowParallelLinear(
            everywhere * value,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.tp,
        )

    def _columns(self, inputs: int, outputs: int) -> ColumnParallelLinear:
        return ColumnParallelLinear(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            bias=False,
            gather_output=False,
            tp_group=self.tp,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedTokens,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output [s, B, hidden], and no bias.

        Args:
            hidden_states: [s, B, hidden], with sequence parallel the rank's part of the S tokens.
            attention_mask: Not read; the layout says what each token sees.
            rotary_pos_emb: The angles [S, 1, 1, rotated width], each twice.
            packed_seq_params: The layout.
        """
        plain, rotated, value = self.widths
        q_plain, q_rotated = self._queries(hidden_states).split([plain, rotated], -1)
        latent, k_rotated = self.linear_kv_down_proj(hidden_states).split([self.config.kv_lora_rank, rotated], -1)
        keys_and_values, _bias = self.linear_kv_up_proj(self.kv_layernorm(latent))
        k_plain, v = self._by_head(keys_and_values).split([plain, value], -1)
        # Each rank's heads give a part of this gradient; backward sums the parts.
        if self.config.sequence_parallel:
            k_rotated = gather_from_sequence_parallel_region(k_rotated, group=self.tp)
        else:
            k_rotated = copy_to_tensor_model_parallel_region(k_rotated, group=self.tp)
        angles = rotary_pos_emb[..., : rotated // 2]
        q_rotated = rotate_pairs(q_rotated, angles, self.rotary_factor)
        k_rotated = rotate_pairs(k_rotated[:, :, None], angles, self.rotary_factor).expand_as(q_rotated)
        out = self.core_attention(
            torch.cat([q_plain, q_rotated], -1),
            torch.cat([k_plain, k_rotated], -1),
            v,
            packed_seq_params=packed_seq_params,
        )
        return self.linear_proj(out)[0], None

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.config.q_lora_rank is None:
            return self._by_head(self.linear_q_proj(hidden_states)[0])
        return self._by_head(self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))[0])

    def _by_head(self, states: torch.Tensor) -> torch.Tensor:
        return states.view(*states.shape[:-1], self.heads, -1)


def rotate_pairs(states: torch.Tensor, angles: torch.Tensor, factor: float) -> torch.Tensor:
    """Rotate neighbouring numbers of ``states`` [S, B, heads, D] by ``angles`` fp32 [S, 1, 1, D/2], times ``factor``.

    As in transformers (``apply_rotary_pos_emb_interleave``), the first numbers of all pairs come first in the result.
    """
    cosine, sine = ((function(angles) * factor).to(states.dtype) for function in (torch.cos, torch.sin))
    first, second = states[..., 0::2], states[..., 1::2]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def yarn_factors(config: MLATransformerConfig) -> tuple[float, float]:
    """Return the factors of rotated vectors and of attention scores (YaRN, arXiv 2309.00071 §3.4); 1 without YaRN."""
    if config.rope_type != "yarn":
        return 1.0, 1.0

    def growth(scale: float) -> float:
        longer = config.rotary_scaling_factor
        return 0.1 * scale * math.log(longer) + 1.0 if longer > 1 else 1.0

    return growth(config.mscale) / growth(config.mscale_all_dim), growth(config.mscale_all_dim) ** 2
