"""Configurations of tiny models by their type, alongside ``tiny_llama.SHAPE``: all that are compared with transformers.

``tiny_config`` makes one of every type that transformers has as a causal language model.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny_llama import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from miles.models.tiny import shrunk_config

EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = EXPERTS | dict(shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
SIGMOID = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
LATENT = SIGMOID | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
)
# Queries of more than four tokens choose. Many heads make equal scores, whose order is not defined, unlikely.
SPARSE = LATENT | dict(index_n_heads=16, index_head_dim=16, index_topk=4)
MAMBA = dict(
    num_hidden_layers=4,
    layers_block_type=["mamba", "attention", "mlp", "moe"],
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=8,
    n_groups=2,
    moe_shared_expert_intermediate_size=16,
    **SIGMOID,
)
# Shorter than the samples that are compared.
WINDOW = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention"])
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": SPARSE,
    "exaone4": WINDOW,
    "gemma3_text": WINDOW,
    "gemma4_text": WINDOW
    | dict(final_logit_softcapping=None, global_head_dim=8, hidden_size_per_layer_input=0, num_kv_shared_layers=0),
    "glm4": {},
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": SPARSE | dict(indexer_types=["full", "shared"]),
    "gpt_oss": EXPERTS | WINDOW,
    "llama": {},
    "ministral": dict(sliding_window=4),
    "ministral3": dict(sliding_window=4),
    "mistral": dict(sliding_window=None),
    "mixtral": EXPERTS | dict(sliding_window=None),
    "olmo2": {},
    "olmo3": WINDOW,
    "phi3": dict(sliding_window=None),
    "qwen2": {},
    "qwen2_moe": SHARED,
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "nemotron_h": MAMBA,
    "qwen3_5": dict(text_config=SHAPE | LINEAR),
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe": dict(text_config=SHAPE | LINEAR | SHARED),
    "qwen3_5_moe_text": LINEAR | SHARED,
    "qwen3_next": LINEAR | SHARED,
}
# What gives the others of packing.WINDOWED a window.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": dict(sliding_window=4),
    "mixtral": dict(sliding_window=4),
    "phi3": dict(sliding_window=4),
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, sliding_window=4),
    "qwen3": dict(use_sliding_window=True, max_window_layers=1, sliding_window=4),
    "qwen3_moe": dict(use_sliding_window=True, sliding_window=4),
    "smollm3": dict(use_sliding_window=True) | WINDOW,
}
UNTESTED = {
    "starcoder2": dict(sliding_window=None),
    "jamba": SIGMOID,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
}


def config_of(kind: str, **changes: Any) -> PretrainedConfig:
    """Return the configuration of a type, with changes; in one for text and images, of its text part."""
    own = (CONFIGS | UNTESTED)[kind]
    if "text_config" in own:
        return AutoConfig.for_model(kind, text_config=own["text_config"] | changes)
    return AutoConfig.for_model(kind, **(SHAPE | own | changes))


MOST_NUMBERS = 8_000_000
TWO_KINDS = ["sliding_attention", "full_attention"]
STATES = dict(
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=1,
    mamba_chunk_size=8,
    mamba_expand=2,
    mamba_d_ssm=64,
)
INDEXER = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8, indexer_compress_ratio=4)
# Settings of a type that the sizes below lack.
OWN: dict[str, dict[str, Any]] = {
    **CONFIGS,
    **UNTESTED,
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "minicpm3", "youtu"), LATENT),
    "bamba": STATES | dict(attn_layer_indices=[1]),
    "bert-generation": dict(is_decoder=True),
    "dbrx": dict(
        attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
        ffn_config=dict(ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2),
    ),
    "dots1": SIGMOID,
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0),
    "exaone_moe": SIGMOID | EXPERTS | dict(layer_types=TWO_KINDS, mlp_layer_types=["dense", "sparse"]),
    "falcon_h1": STATES,
    "gemma3n_text": dict(
        layer_types=TWO_KINDS,
        activation_sparsity_pattern=[0.0, 0.0],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        laurel_rank=4,
        intermediate_size=[48, 48],
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "granitemoehybrid": STATES | EXPERTS | dict(layer_types=["mamba", "attention"], shared_intermediate_size=16),
    "hy_v4": SPARSE,
    "kimi_linear": LATENT
    | dict(
        num_experts=4,
        layer_types=None,
        linear_attn_config=dict(
            kda_layers=[1], full_attn_layers=[2], num_heads=4, head_dim=8, short_conv_kernel_size=4
        ),
    ),
    "lfm2_moe": EXPERTS | dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": LATENT
    | dict(num_layers=2, ffn_hidden_size=48, expert_ffn_hidden_size=16, zero_expert_num=1, moe_topk=2),
    "mamba2": dict(num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=1, chunk_size=8),
    "mimo_v2_flash": SIGMOID
    | dict(layer_types=TWO_KINDS, mlp_layer_types=["dense", "sparse"], v_head_dim=8, swa_head_dim=8, swa_v_head_dim=8)
    | dict(swa_num_attention_heads=4, swa_num_key_value_heads=2),
    "qwen4_exp": dict(text_config=SHAPE | LINEAR | SHARED | INDEXER),
    "qwen4_exp_text": LINEAR | SHARED | INDEXER,
    "reformer": dict(is_decoder=True, attn_layers=["local", "local"], axial_pos_embds_dim=(16, 16)),
    "xlnet": dict(d_head=8),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "zamba": dict(num_hidden_layers=4, layer_types=["mamba", "hybrid"] * 2, n_mamba_heads=2)
    | dict(mamba_d_state=8, mamba_dt_rank=4, attention_head_dim=16),
    "zamba2": dict(layer_types=["mamba", "hybrid"], hybrid_layer_ids=[1], mamba_d_state=8, mamba_ngroups=1)
    | dict(n_mamba_heads=4, mamba_headdim=16, chunk_size=8),
}
FAMILIES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# The largest values of fields, by their names.
_MOST = {
    "vocab_size": 64,
    r"layers|n_layer$": 2,
    r"top_?k$|experts_per_tok|topk_group": 2,
    r"experts$|moe_num": 4,
    r"n_group$": 1,
    r"key_value_heads|kv_heads|kv_n_heads": 2,
    r"heads$|n_head$": 4,
    r"rank$|head_dim|qk_.*dim|v_head|rotary_dim|state_size|d_state": 8,
    r"hidden_size|n_embd|d_model|embedding_size|dim_model": 32,
    r"intermediate|inner|ffn|d_ff|dim_ff": 48,
    r"_token_id$": 2,
}


def tiny_config(kind: str) -> PretrainedConfig:
    """Return the configuration of a small model that runs: of the common sizes, or else shrunk from the default.

    Raises ``ValueError`` with the faults of both if neither runs.
    """
    faults = []
    for make in (lambda: SHAPE, lambda: _shrunk(AutoConfig.for_model(kind).to_dict())):
        try:
            config = AutoConfig.for_model(kind, **(make() | OWN.get(kind, {})))
            with torch.device("meta"):
                numbers = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
            if numbers > MOST_NUMBERS:
                raise ValueError(f"{numbers} numbers")
            tiny_model(config)(torch.tensor([[5, 6, 7, 8]]), use_cache=False)
            return config
        except Exception as error:
            faults.append(f"{type(error).__name__}: {error}")
    raise ValueError(f"no tiny {kind}: {'; '.join(faults)}")


def tiny_model(config: PretrainedConfig) -> Any:
    """Return a model where biases, norms and sinks are random too."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    small = shrunk_config({name: value for name, value in config.items() if name not in ("model_type", "dtype")})
    return _capped(small) | {"text_config": _capped(small["text_config"])} if "text_config" in small else _capped(small)


def _capped(config: dict[str, Any]) -> dict[str, Any]:
    result = {}
    for name, value in config.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            result[name] = _capped(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            result[name] = min([value, *(most for pattern, most in _MOST.items() if re.search(pattern, name))])
        elif name != "dtype":
            result[name] = value
    return result
