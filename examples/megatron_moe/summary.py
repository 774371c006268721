"""Summarize a run: reward and the model's auxiliary losses, averaged over the first and the last five steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHOWN = {
    "rollout/reward": "reward",
    "train/moe_aux_loss": "load balance (1 is even)",
    "train/moe_z_loss": "router z-loss",
    "train/mtp_loss": "loss of the head (nats)",
}
WINDOW = 5


def main() -> None:
    """Print one line per metric of the file given on the command line."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    for name, words in SHOWN.items():
        values = [row[name] for row in rows if name in row]
        if not values:
            raise SystemExit(f"{sys.argv[1]}: no {name} in it; the run has trained no step")
        first, last = (sum(part) / len(part) for part in (values[:WINDOW], values[-WINDOW:]))
        print(f"megatron_moe: {words} {first:.3f} -> {last:.3f}")
    print(f"megatron_moe: {sum(row.get('time/step', 0.0) for row in rows):.0f} s")


if __name__ == "__main__":
    main()
