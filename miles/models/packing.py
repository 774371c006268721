"""Decide by its configuration whether FSDP trains a model, packed or padded, and whether the torch engine runs it.

In a packed micro-batch the samples follow each other in one sequence. Attention knows where each begins; a layer with
recurrent state (linear attention, Mamba, a short convolution) does not: its state would pass from one sample to the
next. The FSDP backend computes such layers sample by sample (training/fsdp/models.py), and a test shows that
it is right for the types in ``RECURRENT``. Other types whose configuration names such layers are trained on padded rows
(``--qkv-format bshd``), where every sample begins with an empty state.

The FSDP backend trains every model that transformers can load, except for the types that ``why_not_trained`` names. A
type that neither ``PACKABLE`` nor ``RECURRENT`` has is compared with transformers at the start of the run
(training/fsdp/packing_check.py), and so it is before the torch engine runs it (engine/embedded/torch_engine.py).
tests/fast/models/test_every_family.py tries every type that transformers has.
"""

import tomllib
from importlib.resources import files
from typing import Any

from miles.models.reading import WITH_IMAGES, attends_by_itself, may_have_state, why_not_loaded

# The types (``model_type``) of types.toml, which describes each list.
_TYPES: dict[str, list[str]] = tomllib.loads((files(__package__) / "types.toml").read_text(encoding="utf-8"))
PACKABLE, RECURRENT, WITH_TEXT_MODEL = (tuple(_TYPES[name]) for name in ("packable", "recurrent", "with_text_model"))
SPARSE, WINDOWED, WITH_KNOWN_ROUTERS = (tuple(_TYPES[name]) for name in ("sparse", "windowed", "with_known_routers"))
_DIFFERENT, _NOT_GENERATED, _NOT_TRAINED = (_TYPES[name] for name in ("different", "not_generated", "not_trained"))

# The windows of types that have one if ``sliding_window`` is not there.
_WINDOW_OF_ALL: dict[str, int | None] = {"mistral": 4096}

# Settings of a model that change scores or logits, and their neutral values.
_CHANGED_LOGITS = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
}

WITHOUT_QUANTIZATION = "give a folder with its weights in bf16, without this entry"  # what to do about a quantized one

# Fields of a configuration that name the kind of each layer, and the kinds that have a state.
_LAYER_LISTS = ("layer_types", "layers_block_type")
_RECURRENT_LAYERS = frozenset(("linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"))

_LONGROPE = ("longrope", "su")  # the older name

_ANOTHER = "choose another model"
_OR_SGLANG = f"{_ANOTHER}, or --rollout-engine sglang"

_PLAIN_LAYERS = frozenset(("attention", "full_attention", "sliding_attention", "indexed_attention", "mlp", "moe"))
# Kinds of layers that the torch engine runs.
_GENERATED_LAYERS = _PLAIN_LAYERS - {"attention"} | {"linear_attention"}


def is_compared_by_test(config: dict[str, Any]) -> bool:
    """Return whether one of our tests compares this type of model with transformers. ``config`` is a config.json."""
    return model_type(config) in PACKABLE + RECURRENT or reads_images(config)


def reads_images(config: dict[str, Any]) -> bool:
    """Return whether this model is loaded with its vision tower."""
    return config.get("model_type") in WITH_IMAGES


def has_recurrent_state(config: dict[str, Any]) -> bool:
    """Return whether a layer is known to have a state that passes from token to token."""
    text = config.get("text_config") or config
    layers = {layer for name in _LAYER_LISTS for layer in text.get(name) or ()}
    if layers & _RECURRENT_LAYERS or model_type(config) in RECURRENT:
        return True
    return may_have_state(model_type(config)) and not (layers and layers <= _PLAIN_LAYERS)


def must_be_padded(config: dict[str, Any]) -> bool:
    """Return whether a layer has such a state, and no test shows that packed samples begin without it."""
    return has_recurrent_state(config) and model_type(config) not in RECURRENT


def why_not_shared(config: dict[str, Any]) -> str | None:
    """Return why ranks cannot share the sequences of this model, as words after its type; None if they can."""
    if has_recurrent_state(config):
        return "with recurrent state"
    if reads_images(config):
        return "with images"
    return "with sparse attention" if model_type(config) in SPARSE else None


def _why_not_read(config: dict[str, Any]) -> tuple[str, str] | None:
    """Return why no engine or backend on transformers reads this model, and what to do; None if they may."""
    kind = str(config.get("model_type"))
    if reads_images(config):
        return None
    if "vision_config" in config and kind not in WITH_TEXT_MODEL:
        rule = f"a {kind} is a vision-language model, and transformers has no class for its text model alone"
        return rule, "choose a language model"
    is_decoder = bool(config.get("is_decoder"))
    if "model_type" in config and (fault := why_not_loaded(kind, "auto_map" in config, is_decoder)) is not None:
        return fault
    kind = model_type(config)
    if config.get("is_encoder_decoder"):
        return f"a {kind} has an encoder and a decoder", "choose a decoder-only model"
    if attends_by_itself(kind):
        return f"a {kind} computes its attention on its own, and not over samples or a cache of miles", _ANOTHER
    for name in (str(config.get("model_type")), kind):
        if name in _DIFFERENT:
            return _differs(name, "by miles"), _ANOTHER
    text = config.get("text_config") or config
    if text.get("use_bidirectional_attention") in (True, "all") or text.get("is_causal", True) is False:
        return f"the tokens of a {kind} with this config see those after them", _ANOTHER
    return None


def _differs(kind: str, where: str) -> str:
    return f"a {kind} that is computed {where} is not known to be what transformers computes"


def why_not_trained(config: dict[str, Any]) -> tuple[str, str] | None:
    """Return why the FSDP backend does not train this model, and what to do; None if it may.

    A sliding window is trained in the types of ``WINDOWED`` only: the samples that other types are compared on at the
    start of a run are shorter than a window.
    """
    if (fault := _why_not_read(config)) is not None:
        return fault
    text = config.get("text_config") or config
    kind = model_type(config)
    for name, neutral in _CHANGED_LOGITS.items():
        if text.get(name) not in neutral:
            rule = f"the config of a {kind} sets {name}, which --train-backend fsdp does not compute"
            return rule, "choose a model without it"
    if "chunked_attention" in (text.get("layer_types") or ()):
        return f"--train-backend fsdp does not compute chunked_attention, which a {kind} has", _ANOTHER
    if kind in _NOT_TRAINED:
        return _differs(kind, "by --train-backend fsdp"), _ANOTHER
    if is_quantized(config):
        return "its config.json has a quantization_config, and quantized weights are not trained", WITHOUT_QUANTIZATION
    window = _window(config)
    if window is None or kind in WINDOWED:
        return None
    rule = f"a {kind} with a sliding window (of {window} tokens) has not been compared with transformers"
    return rule, "set sliding_window to null in its config.json if no sequence will be longer, or choose another model"


def why_not_generated(config: dict[str, Any]) -> tuple[str, str] | None:
    """Return why the torch engine does not run this model, and what to do; None if it may.

    Tests compare it with transformers on the types with windows, recurrent state and sparse attention that FSDP trains.
    """
    if (fault := _why_not_read(config)) is not None:
        return fault
    text = config.get("text_config") or config
    kind = model_type(config)
    other = sorted(set(text.get("layer_types") or ()) - _GENERATED_LAYERS)
    if other or (has_recurrent_state(config) and kind not in RECURRENT):
        layers = f"layers of {', '.join(other)}" if other else "recurrent state"
    elif _window(config) is not None and kind not in WINDOWED:
        layers = "a sliding window"
    elif kind in _NOT_GENERATED:
        return _differs(kind, "by --rollout-engine torch"), _OR_SGLANG
    elif text.get("attn_logit_softcapping") is not None:
        layers = "capped scores"
    else:
        return None
    rule = f"a {kind} with {layers} has not been compared with transformers in --rollout-engine torch"
    return rule, _OR_SGLANG


def longest_trained(text: dict[str, Any]) -> tuple[int, str] | None:
    """Return the length limit of a sample on the FSDP backend, in tokens, and the field that sets it; None without one.

    With rotary positions of the kinds longrope and dynamic, a longer one changes the frequencies of all samples of its
    micro-batch, so that their log-probs would depend on how the step is split.

    Args:
        text: The configuration of the model's text part.
    """
    if _rope_type(text) not in (*_LONGROPE, "dynamic"):
        return None
    longest, name = longest_generated(text)
    return None if longest is None else (longest, name)


def longest_generated(text: dict[str, Any]) -> tuple[int | None, str]:
    """Return how many tokens a sequence of the torch engine may have, if that is known, and the field that limits it.

    With rotary positions of the kind longrope, a model has other frequencies once a sequence of its batch exceeds the
    length it was pretrained on. Keys that are in the cache by then have the former ones, and so do the keys of shorter
    sequences.

    Args:
        text: The configuration of the model's text part.
    """
    name = "original_max_position_embeddings"
    if _rope_type(text) in _LONGROPE:
        length = _rope(text).get(name, text.get(name))
        if isinstance(length, int):
            return length, name
    longest = text.get("max_position_embeddings")
    return longest if isinstance(longest, int) else None, "max_position_embeddings"


def _rope_type(text: dict[str, Any]) -> str | None:
    rope = _rope(text)
    return rope.get("rope_type", rope.get("type"))


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    return rope if isinstance(rope, dict) else {}


def _window(config: dict[str, Any]) -> int | None:
    """Return how many keys a query sees in some layer; None if it sees all before it in all layers."""
    text = config.get("text_config") or config
    kind = model_type(config)
    layers = text.get("layer_types") or ()
    if layers:
        has_window = any("sliding" in str(layer) for layer in layers)
    else:
        has_window = bool(text.get("use_sliding_window", True))
    window: int | None = text.get("sliding_window", _WINDOW_OF_ALL.get(kind)) if has_window else None
    return window


def is_quantized(config: dict[str, Any]) -> bool:
    """Return whether the configuration states that the weights are quantized (FP8, INT4, MXFP4, …)."""
    return bool(config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config"))


def model_type(config: dict[str, Any]) -> str:
    """Return the type of the language model; inside a configuration for text and images, the type of its text part."""
    text = config.get("text_config") or {}
    return str(text.get("model_type") or config.get("model_type"))


# Compute how much memory the keys and values of a token take, from a model's configuration alone.


# Tokens: the rows of the embedded engine's cache grow in steps of it, so that they are seldom reallocated.
ROW_STEP = 64


def kv_bytes_per_token(config: dict[str, Any], gpus: int, itemsize: int, keeps_latent: bool = True) -> int:
    """Return the bytes of keys and values of one token on one device of an engine.

    Every layer counts as attention, so that the figure is a bound for a model that also has others.

    Args:
        config: The text part of a ``config.json``.
        gpus: Devices of the engine.
        itemsize: Bytes of a value.
        keeps_latent: Whether the engine keeps the input of the keys and values of latent attention (one vector for all
            heads, on every device), and not the keys and values.

    Raises:
        KeyError: The configuration lacks a size.
    """
    layers = int(config["num_hidden_layers"])
    if config.get("kv_lora_rank"):
        turned = int(config.get("qk_rope_head_dim", 0))
        if keeps_latent:
            return itemsize * layers * (int(config["kv_lora_rank"]) + turned)
        width = int(config["qk_nope_head_dim"]) + turned + int(config["v_head_dim"])
        return itemsize * layers * width * max(1, int(config["num_attention_heads"]) // gpus)
    heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    return 2 * itemsize * layers * width * max(1, heads // gpus)
