"""Write a small random model, demonstrations of a tool, and prompts: ``write.py FOLDER``.

Somebody asks what a made-up thing costs. Half of the demonstrations look the price up with the tool ``price``, and the
others guess. A price can only be known from the tool.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from miles.tiny_models.write import END, character_tokenizer, write_model

NUM_DEMONSTRATIONS = 6000
NUM_TRAINED, NUM_HELD_OUT = 2000, 64  # prompts
QUESTION = "What does this cost: "
CALL, CALL_END = '<tool_call>{"name": "price", "arguments": {"item": "', '"}}</tool_call>'
# The end token closes an answer; other messages are closed by a line break. The schemas of tools are left out, as this
# model cannot read them.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}" + END + "{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)

Row = dict[str, Any]


def things(rng: random.Random) -> Iterator[str]:
    """Yield different made-up names of 3 or 4 letters."""
    seen = set()
    while True:
        name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))
        if name not in seen:
            seen.add(name)
            yield name


def row(thing: str, price: int) -> Row:
    """Return a prompt; its metadata is the shop's."""
    return {"input": QUESTION + thing, "label": str(price), "metadata": {"prices": {thing: price}}}


def demonstration(thing: str, price: int, guess: int | None) -> Row:
    """Return a conversation: a call, the tool's answer and the price, or a guess."""
    asked = {"role": "user", "content": QUESTION + thing}
    if guess is not None:
        return {"chat": [asked, {"role": "assistant", "content": str(guess)}]}
    call = {"role": "assistant", "content": CALL + thing + CALL_END}
    answers = [{"role": "tool", "content": str(price)}, {"role": "assistant", "content": str(price)}]
    return {"chat": [asked, call, *answers]}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``chats.jsonl``, ``shop/train.jsonl`` and ``shop/heldout.jsonl``, which share no thing."""
    rng = random.Random(seed)
    named = things(rng)
    chats = []
    for _ in range(NUM_DEMONSTRATIONS):
        price, guess = rng.randint(10, 99), rng.randint(10, 99)
        chats.append(demonstration(next(named), price, rng.choice((guess, None))))
    write_rows(folder / "chats.jsonl", chats)
    for split, number in (("train", NUM_TRAINED), ("heldout", NUM_HELD_OUT)):
        write_rows(folder / "shop" / f"{split}.jsonl", (row(next(named), rng.randint(10, 99)) for _ in range(number)))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 155,000 random parameters, whose tokens are characters and three phrases."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([QUESTION, CALL, CALL_END])
    tokenizer.chat_template = CHAT_TEMPLATE
    config = dict(
        model_type="qwen3",
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
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
