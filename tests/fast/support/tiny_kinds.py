"""Configurations of tiny models by their type, beside ``tiny_llama.SHAPE``: all that are compared with transformers."""

from __future__ import annotations

from typing import Any

from tiny_llama import SHAPE
from transformers import AutoConfig, PretrainedConfig

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
