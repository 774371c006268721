"""Rotary position embedding: frequencies as transformers computes them, angles of each token's own position."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.models.registry import family_of
from miles.training.megatron.model.packed_tokens import PackedTokens

# Kinds whose frequencies depend on nothing but the config. Cosine and sine are scaled by yarn only, which only latent
# attention has (latent_attention.py, yarn_factors).
FIXED_KINDS = ("linear", "llama3")
OF_LATENT_ATTENTION = ("yarn",)


def inverse_frequencies(config: PretrainedConfig) -> torch.Tensor:
    """Return the inverse frequencies of ``config``, fp32 [rotated part of a head / 2], on CPU.

    Raises ``ValueError`` for a kind of rotary embedding whose frequencies change during a run.
    """
    rope = config.rope_parameters
    kind = rope["rope_type"]
    if kind == "default":
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(width * family_of(config.to_dict()).rotated_share(config.to_dict()))
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        inverse: torch.Tensor = 1.0 / (rope["rope_theta"] ** exponents)
        return inverse
    kinds = FIXED_KINDS + OF_LATENT_ATTENTION * (getattr(config, "kv_lora_rank", None) is not None)
    if kind not in kinds:
        raise ValueError(
            f"--hf-checkpoint: its config has rope_type {kind}, and --train-backend megatron computes default, "
            f"{', '.join(kinds)}; choose another model, or --train-backend fsdp"
        )
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    assert scaling == 1.0 or kind in OF_LATENT_ATTENTION
    return frequencies


class PackedRotaryEmbedding(torch.nn.Module):
    """Computes the angles of each token's own position. Replaces Megatron's ``RotaryEmbedding``.

    ``GPTModel`` asks first for the length of the sequence and then for that many angles. This class answers the first
    question with the positions themselves, so that tokens of several samples, or of a slice of a sample under context
    parallelism, get the angles of their own positions.
    """

    def __init__(self, inverse_frequencies: torch.Tensor) -> None:
        super().__init__()
        # fp32 even if the model is cast to another dtype: the angles of late positions need it.
        self._inverse_frequencies = inverse_frequencies.float()

    def get_rotary_seq_len(self, *arguments: Any, **_: Any) -> torch.Tensor:
        """Return the positions of ``packed_seq_params``, the last argument; int64 [S]. All rows have the same."""
        packed = arguments[-1]
        assert isinstance(packed, PackedTokens) and packed.position_ids is not None
        return packed.position_ids[0]

    def forward(self, position_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return the angles [S, 1, 1, D], fp32; Megatron computes their cosine and sine."""
        if self._inverse_frequencies.device != position_ids.device:
            self._inverse_frequencies = self._inverse_frequencies.to(position_ids.device)
        angles = position_ids.float()[:, None] * self._inverse_frequencies[None, :]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]
