"""Check the flags that set fields of Megatron's own dataclasses.

The Hugging Face config determines the shape of the model, and this backend sets some fields itself: a flag may repeat
their values, as launch scripts do, and is an error if it says something else. The fields in ``TRIED`` are passed on.
All others are refused: megatron-core has them, but training with them has not been shown to be correct here.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from miles.base.flags import Errors
from miles.models.base import EXPERT_FIELDS, LAYER_FIELDS

FP32_EPSILON = 2.0**-23

Overrides: TypeAlias = tuple[tuple[str, Any], ...]  # name and value of each field that a flag sets

# The values that the backend sets (training/megatron/model/transformer_config.py, layer_spec.py), and why.
FIXED: dict[str, tuple[Any, str]] = {
    "grad_reduce_in_fp32": (True, "gradients are accumulated and reduced in fp32"),
    "attention_softmax_in_fp32": (True, "the softmax of attention is computed in fp32"),
    "variable_seq_lengths": (True, "micro-batches differ in length"),
    "transformer_impl": ("local", "layers are Megatron's own"),
    "attention_backend": ("auto", "attention is miles' own"),
    "recompute_granularity": ("full", "recomputation is that of whole layers"),
    "recompute_method": ("uniform", "every layer is recomputed"),
    "recompute_num_layers": (1, "every layer is recomputed by itself"),
    "moe_token_dispatcher_type": ("alltoall", "the others take no micro-batches of differing length"),
    "moe_router_bias_update_rate": (0.0, "biases of experts stay those of the checkpoint, as on fsdp"),
    "rope_fusion": (False, "the rotary embedding is that of each token's own position"),
    "position_embedding_table": (False, "positions are rotary"),
    "use_rotary_position_embeddings": (True, "positions are rotary"),
}
TRIED = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "moe_router_dtype",
    "overlap_grad_reduce",
)


def check_overrides(overrides: Overrides, shape: dict[str, Any] | None, flags: dict[str, str], errors: Errors) -> None:
    """Check the fields of Megatron's dataclasses that flags set.

    Args:
        overrides: The fields, by name.
        shape: The model's shape in Megatron's terms; None if its config is not known yet.
        flags: The flag of each field.
        errors: Collects what contradicts the model or the backend.
    """
    for name, value in overrides:
        flag = flags[name]
        shown = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
        if shape is not None and name in shape:
            if not repeats(_by_layer(value, shape[name]) if name == "moe_layer_freq" else value, shape[name]):
                errors.add(contradiction(name, value, flag, shape))
        elif name in FIXED:
            fixed, why = FIXED[name]
            if not repeats(value, fixed):
                errors.add(f"{shown}: contradicts --train-backend megatron: {why}; drop it")
        elif name in TRIED or asks_for_nothing(name, value) or (shape is None and name in SHAPE_FIELDS):
            continue
        elif shape is not None and name in SHAPE_FIELDS:
            errors.add(contradiction(name, value, flag, shape))
        else:
            errors.add(f"{shown}: {refusal_of(name)}; drop it")


def contradiction(name: str, value: Any, flag: str, shape: dict[str, Any]) -> str:
    """Return the error of a field that says something else than the model's config.

    Args:
        name: The field.
        value: Its value; a switch has True or False.
        flag: Its flag.
        shape: The model's shape in Megatron's terms.
    """
    neutral = NEUTRAL_VALUES.get(name, (None,))[0]
    if isinstance(value, bool):
        found = f"says the opposite of {flag}" if name in shape else f"describes a model without {flag}"
    elif shape.get(name, neutral) is None:
        found = f"describes a model without {flag}"
    else:
        found = f"gives {flag} {_words(shape.get(name, neutral))}"
    shown = flag if isinstance(value, bool) else f"{flag} {_words(value)}"
    return f"{shown}: contradicts --hf-checkpoint, whose config.json {found}; drop it"


# Values that ask for nothing, and that scripts give for models which do not have the setting.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "moe_router_num_groups": (1,),
    "moe_router_group_topk": (1,),
    "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_score_function": ("softmax",),
    "moe_token_drop_policy": ("probs",),
    "moe_shared_expert_intermediate_size": (0,),
    "virtual_pipeline_model_parallel_size": (1,),
    "num_distributed_optimizer_instances": (1,),
    "rotary_scaling_factor": (1.0,),
    "rope_type": ("rope",),
}

_UNTESTED = "megatron-core has this setting, but training with it has not been tested here, so it is not accepted"
_REASONS = {
    ("fp8", "fp4"): "training in 8 or 4 bits is not part of this version, which has bf16 and fp32",
}


def asks_for_nothing(name: str, value: Any) -> bool:
    """Return whether a value asks for no more than a model without this setting computes."""
    return value in NEUTRAL_VALUES.get(name, ())


def refusal_of(name: str) -> str:
    """Say why a field that would change the result is refused."""
    return next((why for starts, why in _REASONS.items() if name.startswith(starts)), _UNTESTED)


# Those of layers that no family of this backend has. --train-backend fsdp reads them from the config.
OF_OTHER_MODELS = {
    "rotary_interleaved",
    "moe_shared_expert_gate",
    "attention_output_gate",
    "activation_func_clamp_value",
    "experimental_attention_variant",
    "dsa_indexer_head_dim",
    "dsa_indexer_n_heads",
    "dsa_indexer_topk",
    "moe_latent_size",
    "softmax_type",
    "window_attn_skip_freq",
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_state_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "is_hybrid_model",
}
# The fields that a model's config determines: they can be checked only after it has been read.
SHAPE_FIELDS = {
    *OF_OTHER_MODELS,
    *LAYER_FIELDS,
    *EXPERT_FIELDS,
    "vocab_size",
    "untie_embeddings_and_output_weights",
    "rotary_base",
    "rotary_percent",
    "max_position_embeddings",
    "position_embedding_type",
    "group_query_attention",
    # of families with latent attention, shared experts, or other routers
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "moe_shared_expert_intermediate_size",
    "moe_router_score_function",
    "moe_router_enable_expert_bias",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
}


def repeats(value: Any, wanted: Any) -> bool:
    """Return whether a flag says what is so anyway; lists of equal entries may be written as one entry.

    A float that a config has rounded to fp32, such as 9.999999747378752e-06, is the number that was rounded.
    """
    found = value[0] if isinstance(value, list) and not isinstance(wanted, list) and len(value) == 1 else value
    if isinstance(wanted, list) and len(set(map(str, wanted))) == 1 and found in (wanted[0], [wanted[0]]):
        return True
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=FP32_EPSILON)
    return bool(found == wanted)


def _by_layer(value: Any, wanted: Any) -> Any:
    """Write ``--moe-layer-freq N``, experts in every Nth layer, as one entry per layer."""
    step = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(step, int) and step > 0 and isinstance(wanted, list):
        return [int(layer % step == 0) for layer in range(len(wanted))]
    return value


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
