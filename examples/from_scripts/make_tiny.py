"""Write a tiny Qwen3 with random weights and a tokenizer of characters: ``make_tiny.py FOLDER [--experts 8]``."""

from __future__ import annotations

import argparse
from pathlib import Path

from miles.models.tiny import character_tokenizer, write_model


def main() -> None:
    """Write the model and its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=0)
    options = parser.parse_args()
    tokenizer = character_tokenizer()
    config = dict(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    if options.experts:
        experts = dict(num_experts=options.experts, num_experts_per_tok=2, moe_intermediate_size=16)
        config |= {"model_type": "qwen3_moe", **experts}
    write_model(config, options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
