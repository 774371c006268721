"""A small task for examples: a random model whose tokens are characters, demonstrations and prompts in JSON lines."""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.models.tiny.write import write_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Row = dict[str, Any]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line; make the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def made_up_names(rng: random.Random) -> Iterator[str]:
    """Yield different names of 3 or 4 letters endlessly."""
    seen = set()
    while True:
        name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))
        if name not in seen:
            seen.add(name)
            yield name


def write_small_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, *, hidden: int, intermediate: int, layers: int
) -> None:
    """Write a random Qwen3 with four heads for contexts of 128 tokens, and its tokenizer.

    Args:
        folder: Where to write; created if missing.
        tokenizer: Has ``character_tokenizer``'s end token, of id 0.
        seed: Of the weights.
        hidden: The hidden size, a multiple of four.
        intermediate: The size inside an MLP.
        layers: The number of layers.
    """
    heads = 4
    config = dict(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    write_model(config, folder, seed)
    tokenizer.save_pretrained(folder)


def run_writer(
    description: str | None, write_tasks: Callable[[Path, int], None], write_random_model: Callable[[Path, int], None]
) -> None:
    """Be the command ``write.py FOLDER [--seed N]``: write the task's rows to FOLDER, and its model to FOLDER/model.

    Args:
        description: What ``--help`` says.
        write_tasks: Writes the rows to a folder with a seed.
        write_random_model: Writes the model to a folder with a seed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_tasks(options.folder, options.seed)
    write_random_model(options.folder / "model", options.seed)
