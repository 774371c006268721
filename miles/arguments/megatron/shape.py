"""The model's shape in Megatron's words, read from a Hugging Face config. Torch-free: flags are checked against it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
# Beside them, where Megatron-Bridge says the shape and moves the weights; with the activation that is computed.
BRIDGED = {"mistral": "silu", "nemotron": "relu2"}
PARTLY_ROTATED = ("nemotron",)  # the other models that are computed rotate whole heads
HEADS_IN_CONFIG = "num_nextn_predict_layers"  # how configs say that the checkpoint has heads of multi-token prediction

# Fields of ``TransformerConfig`` that a model's config determines: of every layer, and of those with experts.
LAYER_FIELDS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "normalization",
    "layernorm_zero_centered_gamma",
    "gated_linear_unit",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "attention_dropout",
    "hidden_dropout",
)
EXPERT_FIELDS = (
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_layer_freq",
)


def megatron_shape(config: Config) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` that the ``config.json`` of a model determines.

    Raises ``ValueError`` for a model type, or a setting of it, that this backend would not compute correctly.
    """
    kind = config.get("model_type")
    if kind in BRIDGED:
        rule, way_out = "only Megatron-Bridge converts it", "add --megatron-to-hf-mode bridge, or choose another model"
        raise _refusal(f"model_type {kind}", rule, way_out)
    if kind not in SUPPORTED:
        raise _refusal(f"model_type {kind}", f"only {', '.join(SUPPORTED)} are converted")
    _check_computed(config)
    heads = config["num_attention_heads"]
    shape: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "layernorm_epsilon": config.get("rms_norm_eps", 1e-6),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": kind == "qwen2",
        "qk_layernorm": kind in ("qwen3", "qwen3_moe"),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return shape | (_expert_shape(config) if kind == "qwen3_moe" else {})


def vocabulary_shape(config: Config) -> dict[str, Any]:
    """What ``GPTModel`` is told beside the transformer: vocabulary, tied head, rotary embedding."""
    rope = config.get("rope_parameters") or {}
    return {
        "vocab_size": config["vocab_size"],
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "rotary_base": rope.get("rope_theta", config.get("rope_theta", 10000)),
        "rotary_percent": rotated_share(config),
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope",
        "group_query_attention": (config.get("num_key_value_heads") or 0) not in (0, config["num_attention_heads"]),
    }


def rotated_share(config: Config) -> float:
    """How much of a head is rotated, from its beginning."""
    if config.get("model_type") not in PARTLY_ROTATED:
        return 1.0
    given = {"partial_rotary_factor": 0.5} | config | (config.get("rope_parameters") or {})  # transformers' default
    return given["partial_rotary_factor"]


def _expert_shape(config: Config) -> dict[str, Any]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    layers = range(config["num_hidden_layers"])
    return {
        "num_moe_experts": config.get("num_experts", config.get("num_local_experts")),
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        # softmax over the chosen is the same as over all, renormalized; without renormalizing it is not
        "moe_router_pre_softmax": not config.get("norm_topk_prob", False),
        "moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in layers],
    }


def check_bridged(config: Config) -> None:
    """As far as a config tells, the model is one whose training through Megatron-Bridge has been compared with
    transformers'. Raises ``ValueError`` for another."""
    kind = config.get("model_type")
    if kind not in (*SUPPORTED, *BRIDGED):
        raise _refusal(
            f"model_type {kind}",
            f"through Megatron-Bridge only {', '.join((*SUPPORTED, *BRIDGED))} have been compared with transformers",
        )
    if not any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ()):
        raise _refusal(f"architectures {config.get('architectures')}", "Megatron-Bridge goes by a …ForCausalLM there")
    if kind in SUPPORTED:
        _check_computed(config)
        return
    if config.get("hidden_act") not in (None, BRIDGED[kind]):  # Megatron-Bridge does not look at it
        raise _refusal(f"hidden_act {config['hidden_act']}", f"in a {kind} only {BRIDGED[kind]} is computed")
    window = config.get("sliding_window", 4096 if kind == "mistral" else None)  # transformers' default
    if window:
        way_out = "set it to null in config.json if no sequence will be longer, or choose another model"
        raise _refusal(f"sliding_window {window}", "full attention is trained only", way_out)
    _check_computed(config | {"hidden_act": None})


# (setting, whether a value of it is computed, what is)
_COMPUTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("hidden_act", lambda value: value in (None, "silu"), "the gated SiLU"),
    ("mlp_bias", lambda value: not value, "MLPs without bias"),
    ("attention_dropout", lambda value: not value, "attention without dropout"),
    ("final_logit_softcapping", lambda value: value is None, "plain logits"),
    ("logits_scaling", lambda value: value in (None, 1, 1.0), "plain logits"),
    ("logit_scale", lambda value: value in (None, 1, 1.0), "plain logits"),
)


def _check_computed(config: Config) -> None:
    for name, is_computed, what in _COMPUTED:
        if not is_computed(config.get(name)):
            raise _refusal(f"{name} {config[name]}", f"--train-backend megatron computes {what} only")
    if config.get("attention_bias") and config["model_type"] != "qwen2":
        raise _refusal("attention_bias true", "--train-backend megatron converts it for Qwen2 only")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise _refusal(f"sliding_window {config['sliding_window']}", "full attention is trained only")


def _refusal(
    found: str, rule: str, way_out: str = "choose another model, or --train-backend fsdp for others"
) -> ValueError:
    return ValueError(f"--hf-checkpoint: its config has {found}, and {rule}; {way_out}")
