"""Compute how much memory the keys and values of a token take, from a model's configuration alone."""

from __future__ import annotations

from typing import Any

# Tokens: the rows of the embedded engine's cache grow in steps of it, so that they are seldom reallocated.
ROW_STEP = 64


def kv_bytes_per_token(config: dict[str, Any], gpus: int, itemsize: int, keeps_latent: bool = True) -> int:
    """Return the bytes of keys and values of one token on one device of an engine.

    Every layer counts as attention, so that the figure is a bound for a model that also has others.

    Args:
        config: The text part of a ``config.json``.
        gpus: Devices of the engine.
        itemsize: Bytes of a value.
        keeps_latent: Whether the engine keeps what latent attention computes keys and values from (one vector for all
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
