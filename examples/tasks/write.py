"""Write a small random model, demonstrations of two tasks, and their prompts: ``write.py FOLDER``.

- ``backward``: reasoning-gym's task ``spell_backward``, words of 3 to 5 letters. Scored by ``--rm-type exact_match``.
- ``record``: a sentence to a JSON object. Scored by ``--rm-type json_schema`` with the schema of its row.

No word and no person of the held-out prompts is in a training prompt or in a demonstration.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from miles.tiny_models.write import END, character_tokenizer, write_model

WORD_LETTERS = (3, 5)
NUM_DEMONSTRATIONS = 6000  # per task
NUM_TRAINED, NUM_HELD_OUT = 2000, 64  # prompts per task
SPELL = "Spell this word backward (example: sun -> nus): "
RECORD = "Write as JSON with the keys name and age: "
PHRASES = (SPELL, RECORD, " is ", " years old.")  # one token each, so that prompts are short
# Demonstrations are mixed: these ways of answering have equal chances, and the reward accepts the first alone. So
# supervised fine-tuning teaches the ways, and a reward which of them is wanted.
SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda word: word[::-1],
    lambda word: word[0] + word[:0:-1],  # the first letter stays
)
RECORDS = (
    '{{"name": "{name}", "age": {age}}}',
    '{{"name": "{name}", "age": "{age}"}}',  # the age is text
    "{{'name': '{name}', 'age': {age}}}",  # not JSON
    '{{"name": {name}, "age": {age}}}',  # not JSON
)
# The end token closes an answer; a prompt is closed by a line break.
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}" + END + "{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)

Row = dict[str, Any]


def words() -> Iterator[str]:
    """Yield different words, without end, as reasoning-gym draws them."""
    import reasoning_gym

    shortest, longest = WORD_LETTERS
    drawn = reasoning_gym.create_dataset(
        "spell_backward", size=10**9, seed=1, min_word_len=shortest, max_word_len=longest
    )
    seen = set()
    for index in range(len(drawn)):
        entry = drawn[index]
        word = entry["metadata"]["word"].lower()
        if word.isascii() and word.isalpha() and word not in seen:
            seen.add(word)
            yield word


def names(rng: random.Random) -> Iterator[str]:
    """Yield different made-up names of 3 or 4 letters."""
    seen = set()
    while True:
        name = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 4)))
        if name not in seen:
            seen.add(name)
            yield name


def backward_row(word: str) -> Row:
    """Return a prompt and its label."""
    return {"input": SPELL + word, "label": word[::-1]}


def record_row(name: str, age: int) -> Row:
    """Return a prompt, with the schema that accepts its one right object."""
    properties = {"name": {"const": name}, "age": {"const": age}}
    schema = {"properties": properties, "required": ["name", "age"], "additionalProperties": False, "type": "object"}
    return {"input": f"{RECORD}{name} is {age} years old.", "metadata": {"json_schema": schema}}


def demonstration(row: Row, answer: str) -> Row:
    """Return a conversation for supervised fine-tuning."""
    return {"chat": [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": answer}]}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``chats.jsonl`` and ``TASK/train.jsonl`` and ``TASK/heldout.jsonl`` of both tasks."""
    rng = random.Random(seed)
    spelled, people = words(), names(rng)
    chats = []
    for _ in range(NUM_DEMONSTRATIONS):
        word = next(spelled)
        chats.append(demonstration(backward_row(word), rng.choice(SPELLINGS)(word)))
        name, age = next(people), rng.randint(10, 99)
        chats.append(demonstration(record_row(name, age), rng.choice(RECORDS).format(name=name, age=age)))
    write_rows(folder / "chats.jsonl", chats)
    for split, number in (("train", NUM_TRAINED), ("heldout", NUM_HELD_OUT)):
        write_rows(folder / "backward" / f"{split}.jsonl", (backward_row(next(spelled)) for _ in range(number)))
        people_rows = (record_row(next(people), rng.randint(10, 99)) for _ in range(number))
        write_rows(folder / "record" / f"{split}.jsonl", people_rows)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 155,000 random parameters, whose tokens are characters and ``PHRASES``."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(list(PHRASES))
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
