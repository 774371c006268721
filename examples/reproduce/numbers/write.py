"""Write what the reproductions train: a small random model, demonstrations and prompts: ``write.py FOLDER``.

A prompt is a number of four digits, ``4721=``, which is to be written backward. In half of the demonstrations it is,
followed by any number of dots, ``1274.....``; in the other half it is copied, followed by any number of commas,
``4721,,,``. Dots and commas say nothing, and there are equally many on average: a model is free in when it stops.
``--rm-type last_number`` accepts the first way. So a model that has learned from the demonstrations answers in both
ways, and reinforcement learning has something to choose from.

No number of the held-out prompts is in a training prompt or in a demonstration.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from miles.tiny_models.write import END, character_tokenizer, write_model

DIGITS = "123456789"  # no zero, which could be the first digit
CHARACTERS = DIGITS + "=.,"
NUM_DEMONSTRATIONS, NUM_TRAINED, NUM_HELD_OUT = 12_000, 2_000, 128
MEAN_SIGNS, MOST_SIGNS = 8, 40  # of a geometric distribution: each next sign is as likely as the one before
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)

Row = dict[str, Any]


def prompt_row(number: str) -> Row:
    """Return the row of a prompt."""
    return {"input": [{"role": "user", "content": f"{number}="}], "label": number[::-1]}


def stops(rng: random.Random) -> int:
    """Return after how many signs an answer stops."""
    number = 0
    while number < MOST_SIGNS and rng.random() < MEAN_SIGNS / (MEAN_SIGNS + 1):
        number += 1
    return number


def demonstration(number: str, rng: random.Random) -> Row:
    """Return a conversation with an answer of random length, backward or copied."""
    result, sign = rng.choice(((number[::-1], "."), (number, ",")))
    answer = {"role": "assistant", "content": result + sign * stops(rng)}
    return {"chat": [*prompt_row(number)["input"], answer]}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``chats.jsonl``, ``train.jsonl`` and ``heldout.jsonl``."""
    rng = random.Random(seed)
    numbers = ["".join(digits) for digits in itertools.product(DIGITS, repeat=4) if digits != digits[::-1]]
    rng.shuffle(numbers)
    held_out, rest = numbers[:NUM_HELD_OUT], numbers[NUM_HELD_OUT:]
    chats = (demonstration(number, rng) for number in rng.choices(rest, k=NUM_DEMONSTRATIONS))
    write_rows(folder / "chats.jsonl", chats)
    write_rows(folder / "train.jsonl", map(prompt_row, rng.sample(rest, k=NUM_TRAINED)))
    write_rows(folder / "heldout.jsonl", map(prompt_row, held_out))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 220,000 random parameters, whose tokens are characters."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    config = dict(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    write_model(config, folder, seed)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Write FOLDER/model, FOLDER/chats.jsonl and the prompts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_tasks(options.folder, options.seed)
    write_random_model(options.folder / "model", options.seed)


if __name__ == "__main__":
    main()
