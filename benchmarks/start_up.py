"""Measure the start of a run: seconds from process start to the first generated token, in total and by part.

    python benchmarks/start_up.py --model outputs/models/SmolLM2-135M-Instruct
    python benchmarks/start_up.py --model … --runs 3 --ways fsdp+torch megatron+torch fsdp+sglang

Each run is ``miles train`` in its own processes, in the quickstart's settings but with one token per answer, so that
the first answer is the first token; it ends there. Runs of the ways take turns, after one run that is not counted and
fills the page cache. Prints medians as JSON. ``cpu_seconds`` add up all processes of a run, up to the first
answer. ``phases`` states when each part began and ended, in seconds since the process started, and the processor
seconds of its process meanwhile; start_up_marks/ names the parts.

Seconds depend on what else the machine does: leave it idle. Processor seconds depend less on it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from miles.base.host import has_bf16

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("fsdp+torch", "megatron+torch", "fsdp+sglang")
FIRST_ANSWER = "rollout: first answer"
LOOK_SECONDS = 0.02
KINDS = {  # by a part of the command line
    "TrainActor": "trainer",
    "RolloutActor": "rollout",
    "EngineActor": "server",
    "sglang": "server",
    "ray": "Ray",
}
LONGEST_SECONDS = 300.0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="backend and engine")
    parser.add_argument("--runs", type=int, default=3, help="runs of each way that are counted")
    parser.add_argument("--no-warm-up", action="store_true", help="count the first run too")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout that runs; default: this one")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="further flags of miles train, after --")
    return parser.parse_args()


def command(way: str, model: str, folder: Path, flags: list[str]) -> list[str]:
    """Return the command of a run."""
    prompts = folder / "prompts.jsonl"
    rows = ({"input": f"What is {a} * {b}?", "label": str(a * b)} for a in range(1, 10) for b in range(1, 10))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    backend, engine = way.split("+")
    words = f"""
        --train-backend {backend} --rollout-engine {engine} --device cpu --colocate --actor-num-gpus-per-node 1
        --input-key input --label-key label --apply-chat-template --rollout-shuffle --rm-type last_number
        --num-rollout 1 --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 1
        --use-kl-loss --kl-loss-coef 0.0 --lr 1e-5 --lr-decay-style constant
        --use-dynamic-batch-size --max-tokens-per-gpu 4096
        {"--bf16" if has_bf16() else "--fp32"}
    """
    paths = [
        "--hf-checkpoint",
        str(Path(model).resolve()),
        "--prompt-data",
        str(prompts),
        "--output-dir",
        str(folder / "run"),
    ]
    return [sys.executable, "-m", "miles", "train", *words.split(), *paths, *flags]


def marks_in(folder: Path) -> list[dict[str, Any]]:
    """Return the marks that all processes have written so far, each with its process id."""
    rows = []
    for file in folder.glob("*.jsonl"):
        for line in file.read_text().splitlines():
            with suppress(json.JSONDecodeError):  # the last line may be half written
                rows.append({"process": int(file.stem), **json.loads(line)})
    return rows


def cpu_seconds(launcher: psutil.Process) -> Counter[str]:
    """Return the processor seconds of the processes of a run by kind, with those that have ended below them."""
    total: Counter[str] = Counter()
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            kind = "launcher" if process == launcher else kind_of(words)
            total[kind] += sum(process.cpu_times()[:4])
    return total


def kind_of(words: str) -> str:
    """Return which kind of process has a command line of ``words``."""
    for part, kind in KINDS.items():
        if part in words:
            return kind
    return "others"


def run(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Start a run, end it after its first answer, and return its figures."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        marks = folder / "marks"
        marks.mkdir()
        paths = [str(ROOT / "benchmarks" / "start_up_marks"), str(options.checkout), os.environ.get("PYTHONPATH")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "START_UP_MARKS": str(marks)}
        flags = [word for word in options.flags if word != "--"]
        log = folder / "log.txt"
        with log.open("wb") as output:
            began = time.time()
            started = subprocess.Popen(
                command(way, options.model, folder, flags),
                env=environment,
                cwd=options.checkout,
                stdout=output,
                stderr=output,
            )
            launcher = psutil.Process(started.pid)
            while not any(row["mark"] == FIRST_ANSWER for row in marks_in(marks)):
                if started.poll() is not None or time.time() - began > LONGEST_SECONDS:
                    raise SystemExit(f"{way}: no answer; the run said:\n{log.read_text()[-3000:]}")
                time.sleep(LOOK_SECONDS)
            cpu = cpu_seconds(launcher)
            started.send_signal(signal.SIGTERM)
            started.wait()
        rows = sorted(marks_in(marks), key=lambda row: row["began"])
    return {
        "seconds": next(row["ended"] for row in rows if row["mark"] == FIRST_ANSWER) - began,
        "cpu_seconds": sum(cpu.values()),
        "cpu_by_process": {kind: round(seconds, 2) for kind, seconds in cpu.most_common()},
        "phases": {
            row["mark"]: [round(row["began"] - began, 2), round(row["ended"] - began, 2), round(row["cpu"], 2)]
            for row in rows
            if row["mark"] != "process"
        },
    }


def main() -> None:
    options = parse()
    by_way: dict[str, list[dict[str, Any]]] = {way: [] for way in options.ways}
    for turn in range(options.runs + (not options.no_warm_up)):
        for way in options.ways:
            figures = run(way, options)
            print(f"{way} {figures['seconds']:.2f} s, {figures['cpu_seconds']:.2f} cpu s", file=sys.stderr, flush=True)
            if turn > 0 or options.no_warm_up:
                by_way[way].append(figures)
    result = {}
    for way, runs in by_way.items():
        middle = sorted(runs, key=lambda figures: figures["seconds"])[len(runs) // 2]
        result[way] = {
            "seconds": round(statistics.median(figures["seconds"] for figures in runs), 2),
            "cpu_seconds": round(statistics.median(figures["cpu_seconds"] for figures in runs), 2),
            "cpu_by_process": middle["cpu_by_process"],
            "phases": middle["phases"],
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
