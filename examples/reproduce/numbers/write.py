"""Write a small random model, demonstrations and prompts: ``python -m examples.reproduce.numbers.write FOLDER``.

A prompt is a number of four digits, ``4721=``, which is to be written backward. In half of the demonstrations it is,
followed by any number of dots, ``1274.....``; in the other half it is copied, followed by any number of commas,
``4721,,,``. Dots and commas say nothing, and there are equally many on average: a model is free in when it stops.
``--rm-type last_number`` accepts the first way. So a model that has learned from the demonstrations answers in both
ways, and reinforcement learning has something to choose from.

No number of the held-out prompts is in a training prompt or in a demonstration.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from examples.small_task import Row, run_writer, write_rows, write_small_model
from miles.models.tiny import END, character_tokenizer

DIGITS = "123456789"  # no zero, which could be the first digit
CHARACTERS = DIGITS + "=.,"
NUM_DEMONSTRATIONS, NUM_TRAINED, NUM_HELD_OUT = 12_000, 2_000, 128
MEAN_SIGNS, MOST_SIGNS = 8, 40  # of a geometric distribution: each next sign is as likely as the one before
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}" + END + "{% endif %}{% endfor %}"
)


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


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 220,000 random parameters, whose tokens are characters."""
    tokenizer = character_tokenizer(CHARACTERS)
    tokenizer.chat_template = CHAT_TEMPLATE
    write_small_model(folder, tokenizer, seed, hidden=96, intermediate=256, layers=2)


if __name__ == "__main__":
    run_writer(__doc__, write_tasks, write_random_model)
