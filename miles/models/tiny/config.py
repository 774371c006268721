"""Shrink a model's ``config.json`` to a few layers of small width that still have the features of the family.

What stays: the kinds of layers, grouped-query and latent attention, experts, shared experts, routing by groups, norms,
biases, ties, the vocabulary and the maximum length. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

HEAD_DIM = 16
HIDDEN = 64
LAYERS = 2
_ROTATED = 8  # of a head with latent attention

# Numbers that only say how large a part is: the value is replaced if the config has one. Multiples of 8, so that
# grouped products and tensor parallelism over two ranks work.
_SIZES: dict[str, int] = {
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": _ROTATED,
    "qk_head_dim": HEAD_DIM + _ROTATED,
    "v_head_dim": HEAD_DIM,
    "linear_key_head_dim": HEAD_DIM,
    "linear_value_head_dim": HEAD_DIM,
    "mamba_head_dim": HEAD_DIM,
    "ssm_state_size": HEAD_DIM,
    "index_head_dim": HEAD_DIM,
    "hidden_size_per_layer_input": 32,
}
# Counts that may not exceed a small number.
_COUNTS: dict[str, int] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "n_groups": 2,
    "index_n_heads": 4,
}
_HEADS_OF_LATER_TOKENS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # transformers' models have none
_DROPPED = ("quantization_config", "torch_dtype", "auto_map", "_name_or_path", "transformers_version")


def shrunk_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a tiny model of the same family, in fp32.

    >>> small = shrunk_config({"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128,
    ...                        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936})
    >>> small["num_hidden_layers"], small["num_attention_heads"], small["num_key_value_heads"], small["vocab_size"]
    (2, 8, 2, 151936)
    """
    small = {name: value for name, value in config.items() if name not in _DROPPED}
    if isinstance(config.get("text_config"), Mapping):
        return small | {"text_config": shrunk_config(config["text_config"]), "dtype": "float32"}
    kept = _kept_layers(config)
    layers = config.get("num_hidden_layers")
    for name, value in config.items():
        if layers is not None and isinstance(value, list) and len(value) == layers:
            small[name] = [value[layer] for layer in kept]  # one entry per layer
    if isinstance(config.get("hybrid_override_pattern"), str):
        small["hybrid_override_pattern"] = "".join(config["hybrid_override_pattern"][layer] for layer in kept)
    if isinstance(config.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [i for i, layer in enumerate(kept) if layer in config["mlp_only_layers"]]
    small |= {name: size for name, size in _SIZES.items() if config.get(name)}
    small |= {name: min(config[name], most) for name, most in _COUNTS.items() if isinstance(config.get(name), int)}
    small |= {name: 0 for name in _HEADS_OF_LATER_TOKENS if name in config}
    small |= _attention(config)
    small |= _attention_of_some_layers(config, small, kept)
    if isinstance(config.get("max_window_layers"), int):
        small["max_window_layers"] = min(config["max_window_layers"], len(kept))
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), Mapping):
            small[name] = _rope(config[name], small)
    return small | {"num_hidden_layers": len(kept), "dtype": "float32"}


def _kept_layers(config: Mapping[str, Any]) -> list[int]:
    """Return which layers stay: the first of each kind, in order, and at least two."""
    named = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")
    lists = [config[name] for name in named if config.get(name)]
    first_shared = _first_shared_layer(config)
    if lists and first_shared is not None:
        lists.append([layer >= first_shared for layer in range(len(lists[0]))])
    kinds: Sequence[Any] = list(zip(*lists, strict=False))
    kept = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    kept = [] if len(kept) == 1 else kept
    total = config.get("num_hidden_layers") or len(kinds) or LAYERS
    dense = config.get("first_k_dense_replace") or 0
    if not kept and 0 < dense < total:
        kept = [0, dense]  # a dense layer, and one with experts
    kept += [i for i in range(total) if i not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def _first_shared_layer(config: Mapping[str, Any]) -> int | None:
    """Return the first of the layers that have no keys and values of their own; None if all have some."""
    shared = config.get("num_kv_shared_layers")
    return config["num_hidden_layers"] - shared if shared and config.get("num_hidden_layers") else None


def _attention_of_some_layers(
    config: Mapping[str, Any], small: Mapping[str, Any], kept: Sequence[int]
) -> dict[str, Any]:
    """Return what says which layers have other heads, or no keys of their own; wider heads stay wider."""
    found: dict[str, Any] = {}
    first_shared = _first_shared_layer(config)
    if first_shared is not None:
        found["num_kv_shared_layers"] = sum(layer >= first_shared for layer in kept)
    own_names = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}

    def of_one_layer(given: Mapping[str, Any]) -> dict[str, Any]:
        heads: dict[str, Any] = {}
        for name, value in given.items():
            usual = own_names.get(name, name)
            if usual == "head_dim" and value:
                value = HEAD_DIM * max(1, value // (config.get("head_dim") or value))
            elif usual == "num_key_value_heads" and value:
                value = min(value, small["num_key_value_heads"])
            heads[name] = value
        return heads

    found |= of_one_layer({name: config[name] for name in own_names if name in config})
    others = config.get("per_layer_config")
    if isinstance(others, Mapping):
        at = {layer: i for i, layer in enumerate(kept)}
        found["per_layer_config"] = {
            str(at[int(layer)]): of_one_layer(heads) for layer, heads in others.items() if int(layer) in at
        }
    return found


def _attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Return heads and width; queries that share a key still do, and two ranks can share the heads."""
    heads = config.get("num_attention_heads")
    if heads is None:
        return {"hidden_size": HIDDEN} if "hidden_size" in config else {}
    keys = config.get("num_key_value_heads") or heads
    small_keys = min(keys, 2)
    small_heads = 4 if keys == heads else small_keys * min(max(heads // keys, 1), 4)
    small_keys = small_heads if keys == heads else small_keys
    hidden = HIDDEN if HIDDEN % small_heads == 0 else small_heads * HEAD_DIM  # 6 heads: three queries share a key
    found = {"num_attention_heads": small_heads, "hidden_size": hidden}
    if config.get("num_key_value_heads"):
        found["num_key_value_heads"] = small_keys
    if config.get("kv_lora_rank"):
        return found | ({"head_dim": _ROTATED} if config.get("head_dim") else {})
    if config.get("head_dim"):
        return found | {"head_dim": HEAD_DIM}
    return found | {"hidden_size": small_heads * HEAD_DIM}


def _rope(given: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings for the small heads; parameters by kind of layer have several."""
    rotated = small.get("qk_rope_head_dim") or HEAD_DIM
    share = given.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
    pairs = int(rotated * share) // 2
    found: dict[str, Any] = {
        name: _rope(value, small) if isinstance(value, Mapping) else value for name, value in given.items()
    }
    cuts: dict[str, Callable[[list[Any]], list[Any]]] = {
        "long_factor": lambda factors: factors[:pairs],
        "short_factor": lambda factors: factors[:pairs],
        "mrope_section": lambda _: [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }
    return found | {name: cut(found[name]) for name, cut in cuts.items() if isinstance(found.get(name), list)}
