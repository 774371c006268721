"""Write the numbers to find as prompts, and a tiny random model whose tokens are words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.models.tiny import write_model

NUMBERS = range(1, 4)
WORDS = ["<pad>", "<start>", "<end>", "user", "assistant", "guess", "higher", "lower", "digit", *map(str, range(10))]
TEMPLATE = (
    "{% for message in messages %}<start> {{ message.role }} {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)


def write_tiny(folder: Path) -> None:
    """Write a Llama of two layers with random weights, and its tokenizer."""
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end>", pad_token="<pad>", additional_special_tokens=["<start>"]
    )
    tokenizer.chat_template = TEMPLATE
    config = dict(
        model_type="llama",
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=WORDS.index("<end>"),
        pad_token_id=WORDS.index("<pad>"),
    )
    write_model(config, folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Write ``model/`` and ``prompts.jsonl``: one prompt per number. The model never sees the number itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    write_tiny(folder / "model")
    rows = [{"input": "guess", "label": "found", "metadata": {"number": number}} for number in NUMBERS]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"make_data: {len(rows)} prompts and a tiny model in {folder}")


if __name__ == "__main__":
    main()
