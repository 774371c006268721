"""Write products of two-digit numbers as prompts that show how to call a calculator."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

NUM_TRAIN, NUM_HELD_OUT = 256, 24
PROMPT = "Q: What is 31 * 45?\nA: calc(31 * 45) = 1395\n\nQ: What is {a} * {b}?\nA:"


def write(path: Path, pairs: list[tuple[int, int]]) -> None:
    """Write one JSON object per line: ``input`` is the question, ``label`` the product as text."""
    rows = ({"input": PROMPT.format(a=a, b=b), "label": str(a * b)} for a, b in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl``, which share no pair of numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0, help="which pairs are drawn")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    unordered = [(a, b) for a in range(12, 100) for b in range(a, 100) if (a, b) != (31, 45)]
    drawn = random.Random(options.seed).sample(unordered, NUM_TRAIN + NUM_HELD_OUT)
    write(options.folder / "train.jsonl", drawn[:NUM_TRAIN])
    write(options.folder / "heldout.jsonl", drawn[NUM_TRAIN:])
    print(f"make_data: {NUM_TRAIN} training prompts, {NUM_HELD_OUT} held out, in {options.folder}")


if __name__ == "__main__":
    main()
