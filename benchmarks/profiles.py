"""Profile a step of the quickstart with each combination of backend and engine, by process and kind of operation.

    python benchmarks/profiles.py --model outputs/models/SmolLM2-135M-Instruct [--keep FOLDER]

Each run is ``miles quickstart --profile`` of three iterations, and records the second. Prints one JSON object:
for each combination the seconds of the iteration, and for each process its idle seconds and the seconds of each kind of
operation; the threads of a process add up. ``--keep`` copies the traces and tables to a folder.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMBINATIONS = [(backend, engine) for engine in ("torch", "sglang") for backend in ("fsdp", "megatron")]
PROCESSES = ("trainer rank 0", "rollout")
ROW = re.compile(r"  (\S.*?)\s+(\d+\.\d+) s ")


def seconds_of(table: str) -> dict[str, dict[str, float]]:
    """Return the seconds by kind of operation of each part of a profile's table.

    >>> seconds_of("iteration 1: 2.000 s\\n\\nrollout\\n  idle          1.500 s  75.0 %\\n")
    {'rollout': {'idle': 1.5}}
    """
    seconds: dict[str, dict[str, float]] = {}
    for part in table.split("\n\n")[1:]:
        name, *rows = part.splitlines()
        seconds[name] = {row[1]: float(row[2]) for row in map(ROW.match, rows) if row}
    return seconds


def profile(model: Path, backend: str, engine: str, folder: Path) -> dict[str, object]:
    """Run the quickstart and return the seconds of the recorded iteration, and of its processes by kind."""
    flags = f"--num-rollout 3 --profile --no-report --train-backend {backend} --rollout-engine {engine}"
    command = [sys.executable, "-m", "miles", "quickstart", str(model), "--output-dir", str(folder), *flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
    table = (folder / "profile" / "iteration_1.txt").read_text(encoding="utf-8")
    parts = seconds_of(table)
    return {"seconds": float(table.split()[2]), "processes": {name: parts[name] for name in PROCESSES}}


def main() -> None:
    """Profile each combination and print the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="copy the traces and tables to this folder")
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend, engine in COMBINATIONS:
            name = f"{backend}+{engine}"
            figures[name] = profile(options.model.resolve(), backend, engine, Path(folder) / name)
            if options.keep:
                shutil.copytree(Path(folder) / name / "profile", options.keep / name, dirs_exist_ok=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
