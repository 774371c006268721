"""The shape of a model as Megatron-Bridge gives it. What our layers do not compute is refused by its name.

A provider of Megatron-Bridge is a ``TransformerConfig`` with some fields of the model. A field that is not at its
default is either passed on (``PASSED_ON``), read from the Hugging Face config instead (``FROM_CONFIG``), or does not
change what the model computes (``WITHOUT_EFFECT``). Any other field is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import torch.nn.functional as F
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.core.activations import squared_relu
from transformers import PretrainedConfig

from miles.models.base import EXPERT_FIELDS, LAYER_FIELDS
from miles.models.registry import BRIDGED, check_bridged, megatron_shape, vocabulary_shape
from miles.training.megatron.model.rotary_embedding import inverse_frequencies

PASSED_ON = (*LAYER_FIELDS, "activation_func")
FROM_CONFIG = (
    "vocab_size",
    "share_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    # The frequencies are those of transformers for the same config (rotary_embedding.py).
    "rotary_base",
    "rope_scaling",
    "rope_scaling_factor",
    "seq_len_interpolation_factor",
)
WITHOUT_EFFECT = (
    # of training, set by flags of miles
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
    "seq_length",
    # how numbers are stored, drawn and reduced
    "autocast_dtype",
    "bf16",
    "fp16",
    "params_dtype",
    "pipeline_dtype",
    "moe_router_dtype",
    "attention_softmax_in_fp32",
    "init_method_std",
    # which kernels compute them
    "apply_rope_fusion",
    "cp_comm_type",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "moe_token_dispatcher_type",
    "persist_layer_norm",
    # of the way Megatron-Bridge builds a model
    "hf_model_id",
    "make_vocab_size_divisible_by",
)
NORMS = (("RMSNorm", False), ("LayerNorm", True))  # norms.py
MLPS = ((F.silu, True), (squared_relu, False))


def bridge_shape(config: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of ``TransformerConfig``, as ``megatron_shape`` does for the models that miles converts.

    Raises ``ValueError`` naming what Megatron-Bridge says and our layers do not compute, and for a model that miles
    converts, what the two read differently.
    """
    check_bridged(config.to_dict())
    inverse_frequencies(config)  # refuses kinds of rotary embedding that are not computed
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    check_provider(provider, config)
    shape = {name: getattr(provider, name) for name in PASSED_ON}
    shape["num_query_groups"] = shape["num_query_groups"] or shape["num_attention_heads"]
    shape["kv_channels"] = shape["kv_channels"] or shape["hidden_size"] // shape["num_attention_heads"]
    if provider.num_moe_experts:
        shape |= {name: getattr(provider, name) for name in EXPERT_FIELDS}
        every = shape["moe_layer_freq"]
        if isinstance(every, int):
            shape["moe_layer_freq"] = [int(layer % every == 0) for layer in range(shape["num_layers"])]
    if config.model_type not in BRIDGED:  # one that miles reads itself
        for name, value in megatron_shape(config.to_dict()).items():
            if shape.get(name) != value:
                raise _refusal(name, shape.get(name), f"miles reads {value} in the model's config")
    return shape


def check_provider(provider: Any, config: PretrainedConfig) -> None:
    """Raise ``ValueError`` naming what ``provider`` says of the model and our layers do not compute."""
    _check_kind(provider)
    _check_model(provider, config)


def _check_kind(provider: Any) -> None:
    """Check that it builds Megatron's plain GPT, and sets no field outside the lists above."""
    if getattr(type(provider), "provide", None) is not GPTModelProvider.provide:
        raise _refusal("provider", type(provider).__name__, "it builds the model in its own way")
    known = (*PASSED_ON, *EXPERT_FIELDS, *FROM_CONFIG, *WITHOUT_EFFECT)
    for field in fields(GPTModelProvider):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(provider, field.name)
        says_none = field.name == "mtp_num_layers" and not value  # 0 as well
        if field.name not in known and value != default and not says_none:
            raise _refusal(field.name, value, "--train-backend megatron does not compute it")


def _check_model(provider: Any, config: PretrainedConfig) -> None:
    """Check that the values of known fields are those that were compared with transformers."""
    vocabulary = vocabulary_shape(config.to_dict())
    tied, share = not vocabulary["untie_embeddings_and_output_weights"], vocabulary["rotary_percent"]
    rules: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("position_embedding_type", lambda v: v == "rope", "positions are rotary"),
        ("rotary_percent", lambda v: v == share, f"its rope_parameters say that {share} of a head is rotated"),
        ("vocab_size", lambda v: v == vocabulary["vocab_size"], "the model's config has another one"),
        ("share_embeddings_and_output_weights", lambda v: v == tied, "the model's config says otherwise"),
        ("add_bias_linear", lambda v: not v, "only matrices without bias are computed"),
        ("hidden_dropout", lambda v: not v, "dropout is not computed"),
        ("attention_dropout", lambda v: not v, "dropout is not computed"),
        (
            "normalization",
            lambda v: (v, provider.layernorm_zero_centered_gamma) in NORMS,
            f"with layernorm_zero_centered_gamma {provider.layernorm_zero_centered_gamma} it is not computed",
        ),
        (
            "activation_func",
            lambda v: (v, provider.gated_linear_unit) in MLPS,
            f"with gated_linear_unit {provider.gated_linear_unit} it is not computed",
        ),
    )
    for name, is_computed, why in rules:
        value = getattr(provider, name)
        if not is_computed(value):
            raise _refusal(name, value, why)


def _refusal(name: str, value: Any, why: str) -> ValueError:
    shown = getattr(value, "__name__", value)
    return ValueError(
        f"--megatron-to-hf-mode bridge: Megatron-Bridge gives the model {name} {shown}, and {why}; "
        "choose another model, or --train-backend fsdp for others"
    )
