"""Write a small random model, demonstrations of a tool, and prompts: ``python -m examples.tools.write FOLDER``.

Somebody asks for the price of a made-up thing. Half of the demonstrations look the price up with the tool ``price``,
and the others guess. A price can only be known from the tool.
"""

from __future__ import annotations

import random
from pathlib import Path

from examples.small_task import Row, made_up_names, run_writer, write_rows, write_small_model
from miles.models.tiny import END, character_tokenizer

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
    named = made_up_names(rng)
    chats = []
    for _ in range(NUM_DEMONSTRATIONS):
        price, guess = rng.randint(10, 99), rng.randint(10, 99)
        chats.append(demonstration(next(named), price, rng.choice((guess, None))))
    write_rows(folder / "chats.jsonl", chats)
    for split, number in (("train", NUM_TRAINED), ("heldout", NUM_HELD_OUT)):
        write_rows(folder / "shop" / f"{split}.jsonl", (row(next(named), rng.randint(10, 99)) for _ in range(number)))


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 155,000 random parameters, whose tokens are characters and three phrases."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens([QUESTION, CALL, CALL_END])
    tokenizer.chat_template = CHAT_TEMPLATE
    write_small_model(folder, tokenizer, seed, hidden=64, intermediate=160, layers=3)


if __name__ == "__main__":
    run_writer(__doc__, write_tasks, write_random_model)
