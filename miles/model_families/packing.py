"""Decide by its configuration whether a model can be trained on packed samples.

In a packed micro-batch the samples follow each other in one sequence. Attention knows where each begins; a layer with
recurrent state (linear attention, Mamba, a short convolution) does not: its state would pass from one sample to the
next. The FSDP backend computes such layers sample by sample (training/fsdp/recurrent_layers.py), and a test shows that
it is right for the types in ``RECURRENT``. Other types whose configuration names such layers are trained on padded rows
(``--qkv-format bshd``), where every sample begins with an empty state.

The FSDP backend trains whatever transformers can load. A type that is in neither tuple is compared with transformers at
the start of the run (training/fsdp/packing_check.py).
"""

from __future__ import annotations

from typing import Any

# Types (``model_type``) that tests/fast/training/fsdp/test_packing_check.py compares with transformers, packed and
# padded, and the same for types with recurrent state.
PACKABLE = (
    "deepseek_v3",
    "deepseek_v32",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
)

RECURRENT = (
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_next",
)

# Those of PACKABLE whose attention chooses the keys that a query sees by scores of its own
# (training/fsdp/sparse_attention.py).
SPARSE = ("deepseek_v32", "glm_moe_dsa")

# Types whose layers all have the window that ``sliding_window`` names, and the window if the field is not there.
_WINDOW_OF_ALL: dict[str, int | None] = {"mistral": 4096, "mixtral": None, "phi3": None, "starcoder2": None}
QUANTIZED = (
    "its config.json has a quantization_config, and quantized weights are not trained",
    "give a folder with its weights in bf16, without this entry",
)
NO_WINDOW = "set sliding_window to null in its config.json if no sequence will be longer, or choose another model"

# Fields of a configuration that name the kind of each layer, and the kinds that have a state.
_LAYER_LISTS = ("layer_types", "layers_block_type")
_RECURRENT_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"))


def is_compared_by_test(config: dict[str, Any]) -> bool:
    """Return whether a test of ours compares this type of model with transformers. ``config`` is a config.json."""
    return model_type(config) in PACKABLE + RECURRENT


def has_recurrent_state(config: dict[str, Any]) -> bool:
    """Return whether a layer is known to have a state that passes from token to token."""
    text = config.get("text_config") or config
    layers = {layer for name in _LAYER_LISTS for layer in text.get(name) or ()}
    return model_type(config) in RECURRENT or bool(layers & _RECURRENT_LAYERS)


def must_be_padded(config: dict[str, Any]) -> bool:
    """Return whether a layer has such a state, and no test shows that packed samples begin without it."""
    return has_recurrent_state(config) and model_type(config) not in RECURRENT


def why_not_shared(config: dict[str, Any]) -> str | None:
    """Return why ranks cannot share the sequences of this model, as words after its type; None if they can."""
    if has_recurrent_state(config):
        return "with recurrent state"
    return "with sparse attention" if model_type(config) in SPARSE else None


def why_windowed(config: dict[str, Any]) -> str | None:
    """Return why attention with a sliding window is not trained, if the configuration says that a layer has one."""
    text = config.get("text_config") or config
    kind = model_type(config)
    layers = text.get("layer_types") or ()
    if layers:
        has_window = any("sliding" in str(layer) for layer in layers)
    else:
        has_window = bool(text.get("use_sliding_window", kind in _WINDOW_OF_ALL))
    window = text.get("sliding_window", _WINDOW_OF_ALL.get(kind)) if has_window else None
    return (
        None if window is None else f"a {kind} with a sliding window of {window} tokens: only full attention is trained"
    )


def is_quantized(config: dict[str, Any]) -> bool:
    """Return whether the configuration says that the weights are quantized (FP8, INT4, MXFP4, …)."""
    return bool(config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config"))


def model_type(config: dict[str, Any]) -> str:
    """Return the type of the language model; inside a configuration for text and images, that of its text part."""
    text = config.get("text_config") or {}
    return str(text.get("model_type") or config.get("model_type"))
