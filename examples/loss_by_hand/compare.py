"""Compare the loss that the launcher logged with the one computed by hand: ``python compare.py FOLDER``."""

from __future__ import annotations

import json
import math
import sys
from fractions import Fraction
from pathlib import Path

# Trajectory 1 has two tokens of loss -1; N = 4 trajectories, P = 2 prompts, T = 20 tokens, L = 8.
BY_HAND = {
    "sample_mean": (Fraction(-2, 2) / 4, "-(2/2) / 4"),
    "prompt_mean": (Fraction(-2, 8) / 2, "-(2/8) / 2"),
    "token_mean": (Fraction(-2, 20), "-2 / 20"),
    "constant": (Fraction(-2, 8 * 4), "-2 / (8 * 4)"),
}


def main() -> None:
    """Print both losses per mode, and exit with 1 if they differ."""
    wrong = 0
    print(f"{'mode':12} {'by hand':>24} {'train/pg_loss':>14} {'train/loss_mass':>16}")
    for mode, (expected, formula) in BY_HAND.items():
        row = json.loads((Path(sys.argv[1]) / mode / "metrics.jsonl").read_text().splitlines()[-1])
        loss, mass = row["train/pg_loss"], row["train/loss_mass"]
        print(f"{mode:12} {f'{formula} = {float(expected):g}':>24} {loss:>14.6g} {mass:>16.6g}")
        wrong += not math.isclose(loss, expected, rel_tol=1e-5)
    raise SystemExit(min(wrong, 1))


if __name__ == "__main__":
    main()
