"""Write a tiny Qwen3-MoE with random weights, a tokenizer of letters, and prompts for run.sh."""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

END = "<end>"
LETTERS = string.ascii_lowercase


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per letter and an end token."""
    vocabulary = {token: i for i, token in enumerate([END, *LETTERS])}
    letters = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, eos_token=END, pad_token=END)


def make_model(seed: int) -> Qwen3MoeForCausalLM:
    """Return a model of four layers with eight experts, two active per token; 0.3 million parameters in fp32."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config)


def main() -> None:
    """Write FOLDER/model and FOLDER/prompts.jsonl: for each letter, a prompt that asks for it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    make_model(options.seed).save_pretrained(options.folder / "model")
    make_tokenizer().save_pretrained(options.folder / "model")
    rows = [{"input": letter * 3, "label": letter} for letter in LETTERS[:8]]
    (options.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
