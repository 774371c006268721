"""Summarize runs of the quickstart: what each learned, its seconds, and the seconds of the parts of a step.

    SEED=1 bash examples/quickstart/run.sh --output-dir outputs/quickstart-1      and the same with seeds 2 and 3
    python benchmarks/quickstart_steps.py outputs/quickstart-1 outputs/quickstart-2 outputs/quickstart-3

Prints one JSON object: for each run the accuracy on held-out prompts by step and the seconds of all steps, and the
medians of the parts over all steps of all runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

PARTS = {
    "forward and backward": "time/forward_backward",
    "reference log-probs": "time/log_probs",
    "generation": "time/generate",
    "optimizer": "time/optimizer",
    "weights to the engine": "time/sync_weights",
}
Row = dict[str, Any]


def of_run(rows: list[Row], settings: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracy and the seconds of a run with these rows of metrics.jsonl and these settings."""
    return {
        "seed": settings["training"]["seed"],
        "backend": settings["training"]["train_backend"],
        "engine": settings["rollout"]["rollout_engine"],
        "accuracy": {row["step"]: row["eval/heldout/accuracy"] for row in rows if "eval/heldout/accuracy" in row},
        "seconds": round(sum(row["time/step"] for row in rows if "time/step" in row)),
    }


def main() -> None:
    """Read the runs and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="FOLDER", help="--output-dir of a quickstart")
    runs = []
    steps: list[Row] = []
    for folder in parser.parse_args().runs:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        runs.append(of_run(rows, json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"]))
        steps += [row for row in rows if "time/train" in row]
    medians = {part: round(statistics.median(row[name] for row in steps), 3) for part, name in PARTS.items()}
    print(json.dumps({"runs": runs, "median_seconds": medians}))


if __name__ == "__main__":
    main()
