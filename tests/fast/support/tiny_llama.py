"""A random two-layer Llama over 64 tokens for tests of tensors. conftest.py has one with a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)


def tiny_llama(seed: int, **fields: Any) -> LlamaForCausalLM:
    """Return the model in fp32; ``fields`` extend or override its configuration."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(SHAPE | fields)))


def save_tiny_llama(folder: Path, tied: bool) -> None:
    """Save a model whose head is ``tied`` to the embedding or separate."""
    tiny_llama(seed=7, initializer_range=0.15, tie_word_embeddings=tied).save_pretrained(folder)
