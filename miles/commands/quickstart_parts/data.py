"""Write one-digit products as prompts, with nine pairs of digits held out of training."""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

NUM_HELD_OUT_PAIRS = 9
SEED = 0  # which pairs are held out


def split_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the ordered pairs of the digits 1 to 9: 63 to train on and 18 held out.

    Nine unordered pairs of different digits are drawn with ``seed``. Both orders of each are held out, so that training
    on 3 * 7 cannot reveal 7 * 3.
    """
    unordered = list(itertools.combinations(range(1, 10), 2))
    held_out = set(random.Random(seed).sample(unordered, NUM_HELD_OUT_PAIRS))
    pairs = list(itertools.product(range(1, 10), range(1, 10)))
    train = [pair for pair in pairs if (min(pair), max(pair)) not in held_out]
    test = [pair for pair in pairs if (min(pair), max(pair)) in held_out]
    return train, test


def write(path: Path, pairs: list[tuple[int, int]]) -> None:
    """Write one JSON object per line: ``input`` is the question, ``label`` the answer as text."""
    rows = ({"input": f"What is {a} * {b}? Give only the final answer.", "label": str(a * b)} for a, b in pairs)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_sets(folder: Path, seed: int) -> None:
    """Write ``train.jsonl`` and ``heldout.jsonl`` to ``folder``, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = split_pairs(seed)
    write(folder / "train.jsonl", train)
    write(folder / "heldout.jsonl", held_out)
    print(f"quickstart: {len(train)} training prompts, {len(held_out)} held out, in {folder}", file=sys.stderr)


def main() -> None:
    """Write the sets to the folder that is given."""
    parser = argparse.ArgumentParser(prog="python -m miles.commands.quickstart_parts.data", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=SEED, help="which pairs are held out")
    options = parser.parse_args()
    write_sets(options.folder, options.seed)


if __name__ == "__main__":
    main()
