"""Measure what many rows cost: seconds and memory until the first prompts are drawn, and of ``miles explain``.

    python benchmarks/rows_at_scale.py --model MODEL  # 10^6 prompts, 10^5 conversations, 10^4 explained
    python benchmarks/rows_at_scale.py --model MODEL --prompts 10000

Each line of the result is a separate process: ``cold`` checks all rows, ``warm`` has the verdict of an earlier
process, ``resumed`` continues from the position that ``warm`` has saved. ``order`` is a hash of the tokens that were
drawn: it must not depend on the commit. Memory is the peak of the process, without and with the pages of files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = [
    "how",
    "many",
    "apples",
    "pears",
    "boxes",
    "are",
    "left",
    "when",
    "somebody",
    "takes",
    "three",
    "of",
    "the",
    "first",
    "row",
    "and",
    "adds",
    "seven",
    "to",
]
MEASURED = """
import hashlib, json, sys, time
from pathlib import Path
began = time.perf_counter()
from miles.compat.border import read_command
from miles.config.parser import judge
from miles.rollout.pipeline import build_supply
from miles.base.tokenizer import load_tokenizer
position, *words = sys.argv[1:]
settings = judge(read_command(words)).settings
tokenizer = load_tokenizer(settings.model.hf_checkpoint)
imported = time.perf_counter()
stream = build_supply(settings, tokenizer).stream
if Path(position).exists():
    stream.restore(json.loads(Path(position).read_text()))
    drawn = []
else:
    drawn = [list(group.prompt.token_ids) for group in stream.draw(1000)]
    Path(position).write_text(json.dumps(stream.state()))
again = [list(group.prompt.token_ids) for group in stream.draw(8)]
seconds = time.perf_counter() - imported
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
order = hashlib.blake2b(json.dumps(drawn + again).encode(), digest_size=4).hexdigest()
peak, anonymous = (int(status[name].split()[0]) // 1024 for name in ("VmHWM", "RssAnon"))
print(f"{seconds:6.1f} s (imports {imported - began:.1f} s), peak {peak} MiB, at end {anonymous} MiB, order {order}")
"""


def write_rows(path: Path, rows: int, conversations: bool) -> None:
    """Write rows of about 60 words, or conversations of four messages."""
    draw = random.Random(0)
    with path.open("w") as file:
        for number in range(rows):
            text = f"{number}: {' '.join(draw.choices(WORDS, k=60))}?"
            row: dict[str, object] = {"input": text, "label": str(number % 97), "metadata": {"level": number % 5}}
            if conversations:
                half = text[: len(text) // 2]
                row = {"input": [{"role": r, "content": half} for r in ("user", "assistant", "user", "assistant")]}
            file.write(json.dumps(row) + "\n")


def measure(words: list[str], position: Path, environment: dict[str, str]) -> str:
    """Return the report of a process that builds the supply of prompts of a command."""
    command = [sys.executable, "-c", MEASURED, str(position), *words]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder with a chat template")
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--conversations", type=int, default=100_000)
    parser.add_argument("--explained", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        common = f"--hf-checkpoint {options.model} --device cpu --rollout-batch-size 8 --lr 1e-6 --num-rollout 4"
        common += " --rollout-shuffle --rollout-max-response-len 64"
        rl = f"{common} --n-samples-per-prompt 8 --label-key label --rm-type math"
        ways = {
            "text": (options.prompts, rl),
            "template": (options.prompts, f"{rl} --apply-chat-template --rollout-max-prompt-len 1024"),
            "conversations": (options.conversations, f"{common} --loss-type sft_loss --rollout-max-response-len 4096"),
        }
        for name, (rows, words) in ways.items():
            file = Path(folder, f"{rows}-{name == 'conversations'}.jsonl")
            if not file.exists():
                write_rows(file, rows, name == "conversations")
            for state in ("cold", "warm", "resumed") if rows else ():
                position = Path(folder, f"{name}-{'warm' if state == 'resumed' else state}.json")
                result = measure([*words.split(), "--prompt-data", str(file)], position, environment)
                print(f"{name:14}{rows:>9} {state:8}{result}", flush=True)
        file = Path(folder, "explained.jsonl")
        write_rows(file, options.explained, False)
        words = f"{rl} --apply-chat-template --rollout-max-prompt-len 1024 --prompt-data {file}"
        for state in ("cold", "warm"):
            began = time.perf_counter()
            command = [sys.executable, "-m", "miles", "explain", *words.split()]
            text = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
            digest = hashlib.blake2b(text, digest_size=4).hexdigest()
            print(f"explain       {options.explained:>9} {state:8}{time.perf_counter() - began:.2f} s, text {digest}")


if __name__ == "__main__":
    main()
