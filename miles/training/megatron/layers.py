"""The layers of Megatron's model: norms, rotary positions, latent attention, and the specs that combine them.

Norms are torch's, because Megatron's wrapper of them refuses sequence parallel, which needs only a mark.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.models.registry import family_of
from miles.training.megatron.model.packed_tokens import PackedCoreAttention, PackedTokens, mtp_spec
from miles.training.megatron.moe import BalancedRouter, RoutedLayer
from miles.training.megatron.versions import parts_of_experts


def mark_sequence_parallel(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark the parameters, so that Megatron sums their gradients over ranks that share a sequence."""
    parameter: Any
    for parameter in module.parameters():
        parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMS norm with Megatron's signature."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm with Megatron's signature.

    With ``layernorm_zero_centered_gamma`` the weight is the difference from 1.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._centre = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        mark_sequence_parallel(self, config)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized ``input`` [..., hidden]."""
        return F.layer_norm(input, self.normalized_shape, self.weight + self._centre, self.bias, self.eps)


# Rotary position embedding: frequencies as transformers computes them, angles of each token's own position.


# Kinds whose frequencies depend on only the config. Cosine and sine are scaled by yarn only, which only latent
# attention has (``yarn_factors``).
FIXED_KINDS = ("linear", "llama3")
OF_LATENT_ATTENTION = ("yarn",)


def inverse_frequencies(config: PretrainedConfig) -> torch.Tensor:
    """Return the inverse frequencies of ``config``, fp32 [rotated part of a head / 2], on CPU.

    Raises ``ValueError`` for a kind of rotary embedding whose frequencies change during a run.
    """
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(width * family_of(config.to_dict()).rotated_share(config.to_dict()))
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        inverse: torch.Tensor = 1.0 / (rope["rope_theta"] ** exponents)
        return inverse
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    kinds = FIXED_KINDS + OF_LATENT_ATTENTION if is_latent else FIXED_KINDS
    if kind not in kinds:
        raise ValueError(
            f"--hf-checkpoint: its config has rope_type {kind}, and --train-backend megatron computes default, "
            f"{', '.join(kinds)}; choose another model, or --train-backend fsdp"
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert scaling == 1.0 or kind in OF_LATENT_ATTENTION
    return frequencies


class PackedRotaryEmbedding(torch.nn.Module):
    """Computes the angles of each token's own position. Replaces Megatron's ``RotaryEmbedding``.

    ``GPTModel`` asks first for the length of the sequence and then for that many angles. This class answers the first
    question with the positions themselves, so that tokens of several samples, or of a slice of a sample under context
    parallelism, get the angles of their own positions.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        # fp32 even if the model is cast to another dtype: the angles of late positions need it.
        self._inverse_frequencies = inverse_frequencies.float()

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> torch.Tensor:
        """Return the positions of ``packed_seq_params``, the last argument; int64 [S]. All rows have the same."""
        packed = arguments[-1]
        assert isinstance(packed, PackedTokens) and packed.position_ids is not None
        return packed.position_ids[0]

    def forward(self, position_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the angles [S, 1, 1, D], fp32; Megatron computes their cosine and sine."""
        if self._inverse_frequencies.device != position_ids.device:
            self._inverse_frequencies = self._inverse_frequencies.to(position_ids.device)
        angles = position_ids.float()[:, None] * self._inverse_frequencies[None, :]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


# Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1) under miles' layout of tokens.
#
# Keys and values of all heads are made of one narrow vector per token, queries of another; the rotated part of a key is
# the same in every head. Without Transformer Engine, Megatron's own layer cuts the matrices of the narrow vectors over
# the tensor-parallel ranks, and the gradient of the rotated part covers only a rank's own heads. Here every rank has
# these matrices whole, and applies them to its part of the sequence. Names of parameters are Megatron's.


LATENT_EPSILON = 1e-6  # of the norms inside attention: in transformers this number, whatever the config's rms_norm_eps


class WholeLinear(torch.nn.Linear):
    """A matrix that every tensor-parallel rank has whole."""

    def __init__(self, config: MLATransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class LatentAttention(MegatronModule):
    """The attention of one layer, on this rank's heads."""

    def __init__(
        self, config: MLATransformerConfig, layer_number: int, pg_collection: ProcessGroupCollection, **_: Any
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
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=score_factor / math.sqrt(plain + rotated)
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
            attention_mask: Not read; the layout states what each token sees.
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


# The modules of a decoder layer.
#
# Linear layers and experts are Megatron's. Attention goes through ``PackedCoreAttention``, latent attention through
# ``LatentAttention`` before it. Norms are torch's.


def _norm(config: TransformerConfig) -> type:
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[config.normalization]


def decoder_spec(config: TransformerConfig, pp_rank: int, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layers of pipeline stage ``pp_rank``, dense or with experts as ``moe_layer_freq`` states.

    ``chunk`` is the number of its part of an interleaved pipeline, else None.
    """
    pattern = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    assert isinstance(pattern, list) and len(pattern) == config.num_layers
    layers = [_layer_spec(config, bool(has_experts)) for has_experts in pattern]
    first = get_transformer_layer_offset(config, chunk, pp_rank)
    count = get_num_layers_to_build(config, chunk, pp_rank)
    return TransformerBlockSubmodules(layer_specs=layers[first : first + count], layer_norm=_norm(config))


def heads_spec(config: TransformerConfig) -> Any:
    """Return the heads of multi-token prediction, each with a layer like the decoder's last; None without heads."""
    if not config.mtp_num_layers:
        return None
    last = config.moe_layer_freq[-1] if config.num_moe_experts else 0
    return mtp_spec(_layer_spec(config, bool(last)), _norm(config), config.mtp_num_layers)


def _layer_spec(config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    norm = _norm(config)
    is_latent = isinstance(config, MLATransformerConfig)
    # Checkpoints use the names of Transformer Engine's fused layers, as Megatron's own specs do.
    fused = {} if is_latent else {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    fused |= {} if has_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return ModuleSpec(
        module=RoutedLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(module=LatentAttention) if is_latent else _attention_spec(config, norm),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=_expert_spec(config) if has_experts else _dense_spec(),
            mlp_bda=get_bias_dropout_add,
            sharded_state_dict_keys_map=fused,
        ),
    )


def _attention_spec(config: TransformerConfig, norm: type) -> ModuleSpec:
    head_norm: type = norm if config.qk_layernorm else IdentityOp
    submodules = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=PackedCoreAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def _dense_spec() -> ModuleSpec:
    return ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    )


def _expert_spec(config: TransformerConfig) -> Any:
    spec = get_moe_module_spec_for_backend(
        backend=LocalSpecProvider(), num_experts=config.num_moe_experts, moe_grouped_gemm=False
    )
    parts_of_experts(spec).router = BalancedRouter
    return spec
