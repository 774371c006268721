"""Write a small random model, demonstrations of two tasks, and prompts: ``python -m examples.tasks.write FOLDER``.

- ``backward``: reasoning-gym's task ``spell_backward``, words of 3 to 5 letters. Scored by ``--rm-type exact_match``.
- ``record``: a sentence to a JSON object. Scored by ``--rm-type json_schema`` with the schema of its row.

No word and no person of the held-out prompts is in a training prompt or in a demonstration.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from examples.small_task import Row, made_up_names, run_writer, write_rows, write_small_model
from miles.models.tiny import END, character_tokenizer

WORD_LETTERS = (3, 5)
NUM_DEMONSTRATIONS = 6000  # per task
NUM_TRAINED, NUM_HELD_OUT = 2000, 64  # prompts per task
SPELL = "Spell this word backward (example: sun -> nus): "
RECORD = "Write as JSON with the keys name and age: "
PHRASES = (SPELL, RECORD, " is ", " years old.")  # one token each, so that prompts are short
# Demonstrations are mixed: these ways of answering are equally likely, and the reward accepts only the first. So
# supervised fine-tuning teaches all of them, and the reward teaches which of them is wanted.
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


def words() -> Iterator[str]:
    """Yield different words endlessly, as reasoning-gym draws them."""
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


def backward_row(word: str) -> Row:
    """Return a prompt and its label."""
    return {"input": SPELL + word, "label": word[::-1]}


def record_row(name: str, age: int) -> Row:
    """Return a prompt, with a schema that accepts only the right object."""
    properties = {"name": {"const": name}, "age": {"const": age}}
    schema = {"properties": properties, "required": ["name", "age"], "additionalProperties": False, "type": "object"}
    return {"input": f"{RECORD}{name} is {age} years old.", "metadata": {"json_schema": schema}}


def demonstration(row: Row, answer: str) -> Row:
    """Return a conversation for supervised fine-tuning."""
    return {"chat": [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": answer}]}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``chats.jsonl`` and ``TASK/train.jsonl`` and ``TASK/heldout.jsonl`` of both tasks."""
    rng = random.Random(seed)
    spelled, people = words(), made_up_names(rng)
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


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen3 of 155,000 random parameters, whose tokens are characters and ``PHRASES``."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(list(PHRASES))
    tokenizer.chat_template = CHAT_TEMPLATE
    write_small_model(folder, tokenizer, seed, hidden=64, intermediate=160, layers=3)


if __name__ == "__main__":
    run_writer(__doc__, write_tasks, write_random_model)
