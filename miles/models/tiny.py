"""Tiny random models of any family, by shrinking a model's ``config.json``.

A shrunk configuration has few layers of small width, and still the features of the family. Unchanged are the kinds of
layers, grouped-query and latent attention, experts, shared experts, routing by groups, norms, biases, ties, the
vocabulary and the maximum length. Shrinking imports no torch.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models.reading import WITH_IMAGES, class_of, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
    if isinstance(tower := small.pop("vision_config", None), Mapping):
        language = shrunk_config(small)
        hidden = language.get("text_config", language).get("hidden_size", HIDDEN)
        return language | {"vision_config": _tower(tower, hidden)}
    if isinstance(config.get("text_config"), Mapping):
        return small | {"text_config": shrunk_config(config["text_config"]), "dtype": "float32"}
    indices = _layers_of_each_kind(config)
    layers = config.get("num_hidden_layers")
    for name, value in config.items():
        if layers is not None and isinstance(value, list) and len(value) == layers:
            small[name] = [value[layer] for layer in indices]  # one entry per layer
    if isinstance(config.get("hybrid_override_pattern"), str):
        small["hybrid_override_pattern"] = "".join(config["hybrid_override_pattern"][layer] for layer in indices)
    if isinstance(config.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [i for i, layer in enumerate(indices) if layer in config["mlp_only_layers"]]
    small |= {name: size for name, size in _SIZES.items() if config.get(name)}
    small |= {name: min(config[name], most) for name, most in _COUNTS.items() if isinstance(config.get(name), int)}
    small |= {name: 0 for name in _HEADS_OF_LATER_TOKENS if name in config}
    small |= _attention(config)
    small |= _attention_of_some_layers(config, small, indices)
    if isinstance(config.get("max_window_layers"), int):
        small["max_window_layers"] = min(config["max_window_layers"], len(indices))
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(name), Mapping):
            small[name] = _rope(config[name], small)
    return small | {"num_hidden_layers": len(indices), "dtype": "float32"}


def _tower(config: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """Return a small vision tower for a language part of width ``hidden``, whose patches are as large as before."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "out_hidden_size": hidden}
    sizes |= dict.fromkeys(("num_heads", "num_attention_heads"), 4)
    sizes |= dict.fromkeys(("depth", "num_hidden_layers"), LAYERS)
    layers = {"fullatt_block_indexes": [LAYERS - 1], "deepstack_visual_indexes": list(range(LAYERS))}
    smaller: dict[str, Any] = {**sizes, **layers}
    return {**config, **{name: value for name, value in smaller.items() if name in config}}


def _layers_of_each_kind(config: Mapping[str, Any]) -> list[int]:
    """Return which layers stay: the first of each kind, in order, and at least two."""
    named = ("layer_types", "layers_block_type", "hybrid_override_pattern", "mlp_layer_types")
    lists = [config[name] for name in named if config.get(name)]
    first_shared = _first_shared_layer(config)
    if lists and first_shared is not None:
        lists.append([layer >= first_shared for layer in range(len(lists[0]))])
    kinds: Sequence[Any] = list(zip(*lists, strict=False))
    indices = [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    if len(indices) == 1:  # all layers are alike
        indices = []
    total = config.get("num_hidden_layers") or len(kinds) or LAYERS
    dense = config.get("first_k_dense_replace") or 0
    if not indices and 0 < dense < total:
        indices = [0, dense]  # a dense layer, and one with experts
    indices += [i for i in range(total) if i not in indices][: max(0, LAYERS - len(indices))]
    return sorted(indices)


def _first_shared_layer(config: Mapping[str, Any]) -> int | None:
    """Return the first of the layers that have no keys and values of their own; None if all have some."""
    shared = config.get("num_kv_shared_layers")
    return config["num_hidden_layers"] - shared if shared and config.get("num_hidden_layers") else None


def _attention_of_some_layers(
    config: Mapping[str, Any], small: Mapping[str, Any], indices: Sequence[int]
) -> dict[str, Any]:
    """Return the settings for layers that have other heads, or no keys of their own; wider heads stay wider."""
    settings: dict[str, Any] = {}
    first_shared = _first_shared_layer(config)
    if first_shared is not None:
        settings["num_kv_shared_layers"] = sum(layer >= first_shared for layer in indices)
    own_names = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}

    def of_one_layer(values: Mapping[str, Any]) -> dict[str, Any]:
        heads: dict[str, Any] = {}
        for name, value in values.items():
            usual = own_names.get(name, name)
            if usual == "head_dim" and value:
                value = HEAD_DIM * max(1, value // (config.get("head_dim") or value))
            elif usual == "num_key_value_heads" and value:
                value = min(value, small["num_key_value_heads"])
            heads[name] = value
        return heads

    settings |= of_one_layer({name: config[name] for name in own_names if name in config})
    others = config.get("per_layer_config")
    if isinstance(others, Mapping):
        at = {layer: i for i, layer in enumerate(indices)}
        settings["per_layer_config"] = {
            str(at[int(layer)]): of_one_layer(heads) for layer, heads in others.items() if int(layer) in at
        }
    return settings


def _attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Return heads and width; queries that share a key still do, and two ranks can share the heads."""
    heads = config.get("num_attention_heads")
    if heads is None:
        return {"hidden_size": HIDDEN} if "hidden_size" in config else {}
    keys = config.get("num_key_value_heads") or heads
    if keys == heads:
        small_keys = small_heads = 4
    else:
        small_keys = min(keys, 2)
        small_heads = small_keys * min(max(heads // keys, 1), 4)
    hidden = HIDDEN if HIDDEN % small_heads == 0 else small_heads * HEAD_DIM  # 6 heads: three queries share a key
    sizes = {"num_attention_heads": small_heads, "hidden_size": hidden}
    if config.get("num_key_value_heads"):
        sizes["num_key_value_heads"] = small_keys
    if config.get("kv_lora_rank"):
        return sizes | ({"head_dim": _ROTATED} if config.get("head_dim") else {})
    if config.get("head_dim"):
        return sizes | {"head_dim": HEAD_DIM}
    return sizes | {"hidden_size": small_heads * HEAD_DIM}


def _rope(parameters: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of rotary embeddings for the small heads; parameters by kind of layer have several."""
    rotated = small.get("qk_rope_head_dim") or HEAD_DIM
    share = parameters.get("partial_rotary_factor") or small.get("partial_rotary_factor") or 1.0
    pairs = int(rotated * share) // 2
    result: dict[str, Any] = {
        name: _rope(value, small) if isinstance(value, Mapping) else value for name, value in parameters.items()
    }
    cuts: dict[str, Callable[[list[Any]], list[Any]]] = {
        "long_factor": lambda factors: factors[:pairs],
        "short_factor": lambda factors: factors[:pairs],
        "mrope_section": lambda _: [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
    }
    return result | {name: cut(result[name]) for name, cut in cuts.items() if isinstance(result.get(name), list)}


# Write a tiny random model, with a tokenizer, into a folder.


END = "<end>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


def write_like(source: str, folder: Path) -> None:
    """Write a tiny random model of the family of ``source``, with its tokenizer and generation config.

    Args:
        source: A Hugging Face folder, which needs no weights, or a name on the hub.
        folder: Where to write; created if missing.

    Raises:
        OSError: There is no configuration or no tokenizer at ``source``.
        ValueError: The configuration, shrunk, is none that transformers builds a causal language model of.
    """
    from transformers import AutoProcessor, AutoTokenizer, GenerationConfig, PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(source)
    write_model(shrunk_config(config), folder)
    reader = AutoProcessor if config.get("model_type") in WITH_IMAGES else AutoTokenizer
    reader.from_pretrained(source).save_pretrained(folder)
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # many models have none; the configuration's is written already
        return
    generation.save_pretrained(folder)


def write_model(config: Mapping[str, Any], folder: Path, seed: int = 1) -> None:
    """Write a random model of exactly this configuration in fp32, without a tokenizer.

    Raises:
        ValueError: It is none that transformers builds a causal language model of.
    """
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    torch.manual_seed(seed)
    try:
        read = read_config(str(folder))
        model = class_of(read).from_config(read, dtype=torch.float32)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise ValueError(
            f"transformers makes no tiny model of the family {config.get('model_type')} "
            f"({type(error).__name__}: {error})"
        ) from error
    model.save_pretrained(folder)


def character_tokenizer(characters: str = string.printable) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, by default the printable ones, and an end token of id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([END, *characters])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
