"""The modules of a decoder layer.

Linear layers and experts are Megatron's. Attention goes through ``PackedCoreAttention``, latent attention through
``LatentAttention`` before it. Norms are torch's (norms.py).
"""

from __future__ import annotations

from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset

from miles.training.megatron.model.latent_attention import LatentAttention
from miles.training.megatron.model.mtp import mtp_spec
from miles.training.megatron.model.norms import LayerNorm, RMSNorm
from miles.training.megatron.model.packed_tokens import PackedCoreAttention
from miles.training.megatron.moe.router import BalancedRouter, RoutedLayer
from miles.training.megatron.versions import parts_of_experts


def _norm(config: TransformerConfig) -> type:
    return {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}[config.normalization]


def decoder_spec(config: TransformerConfig, pp_rank: int, chunk: int | None) -> TransformerBlockSubmodules:
    """Return the layers of pipeline stage ``pp_rank``, dense or with experts as ``moe_layer_freq`` says.

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
