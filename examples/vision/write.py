"""Write a random vision-language model, demonstrations and prompts: ``python -m examples.vision.write FOLDER``.

An image has two by two cells, each empty or of one of three colors, and the prompt names a color. Half of the
demonstrations count the cells of that color, and the others count all cells that are not empty.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from examples.small_task import Row, run_writer, write_rows, write_small_vision_model

NUM_DEMONSTRATIONS = 6000
NUM_TRAINED, NUM_HELD_OUT = 2000, 64  # prompts
HELD_OUT = 32  # of the 256 arrangements of cells: in no demonstration and no training prompt
SIDE, CELL = 2, 8  # cells of an image along each side, and pixels of a cell, which the model reads as one token
COLORS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220)}
EMPTY = (20, 20, 20)
NOISE = 20  # the most by which a pixel differs from its color
PALETTE = np.array([EMPTY, *COLORS.values()])
Cells = tuple[int, ...]  # places in the palette


def picture(cells: Cells, rng: random.Random) -> str:
    """Return an image as a PNG in base64."""
    pixels = PALETTE[np.array(cells).reshape(SIDE, SIDE)].repeat(CELL, 0).repeat(CELL, 1)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-NOISE, NOISE + 1, pixels.shape)
    buffer = io.BytesIO()
    Image.fromarray((pixels + noise).clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def row(arrangements: Sequence[Cells], rng: random.Random) -> tuple[Row, Cells]:
    """Return a prompt, whose label is the number of cells of its color, and its cells."""
    cells, color = rng.choice(arrangements), rng.choice(list(COLORS))
    label = str(cells.count(1 + list(COLORS).index(color)))
    return {"input": f"<image>{color}?", "images": [picture(cells, rng)], "label": label}, cells


def demonstration(arrangements: Sequence[Cells], rng: random.Random) -> Row:
    """Return a conversation for supervised fine-tuning."""
    asked, cells = row(arrangements, rng)
    answer = rng.choice((asked["label"], str(len(cells) - cells.count(0))))
    chat = [{"role": "user", "content": asked["input"]}, {"role": "assistant", "content": answer}]
    return {"chat": chat, "images": asked["images"]}


def write_tasks(folder: Path, seed: int) -> None:
    """Write ``chats.jsonl``, ``count/train.jsonl`` and ``count/heldout.jsonl``."""
    rng = random.Random(seed)
    arrangements = list(itertools.product(range(len(PALETTE)), repeat=SIDE * SIDE))
    rng.shuffle(arrangements)
    held_out, trained = arrangements[:HELD_OUT], arrangements[HELD_OUT:]
    write_rows(folder / "chats.jsonl", (demonstration(trained, rng) for _ in range(NUM_DEMONSTRATIONS)))
    write_rows(folder / "count" / "train.jsonl", (row(trained, rng)[0] for _ in range(NUM_TRAINED)))
    write_rows(folder / "count" / "heldout.jsonl", (row(held_out, rng)[0] for _ in range(NUM_HELD_OUT)))


def write_random_model(folder: Path, seed: int) -> None:
    """Write a Qwen2.5-VL of 257,000 random parameters, whose tokens are the characters of the task."""
    characters = "".join(sorted({*"".join(COLORS), "?", *"0123456789"}))
    write_small_vision_model(folder, seed, patch=CELL // 2, characters=characters, deviation=0.1)


if __name__ == "__main__":
    run_writer(__doc__, write_tasks, write_random_model)
