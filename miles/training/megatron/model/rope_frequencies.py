"""Rotary frequencies as transformers computes them for the same config."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.arguments.megatron.shape import rotated_share

# Kinds whose frequencies depend on nothing but the config, and which leave cosine and sine unscaled.
FIXED_KINDS = ("linear", "llama3")


def inverse_frequencies(config: PretrainedConfig) -> torch.Tensor:
    """fp32 [rotated part of a head / 2], on CPU. Raises ``ValueError`` for a kind of rotary embedding that is not
    fixed."""
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(width * rotated_share(config.to_dict()))
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (rope["rope_theta"] ** exponents)
    if kind not in FIXED_KINDS:
        raise ValueError(
            f"--hf-checkpoint: its config has rope_type {kind}, and --train-backend megatron computes default, "
            f"{', '.join(FIXED_KINDS)}; choose another model, or --train-backend fsdp"
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert scaling == 1.0
    return frequencies
