"""Compare how OpenMP threads wait, with the cores free and with a neighbor that uses them: generation and training.

``python benchmarks/busy_neighbors.py --model outputs/models/SmolLM2-135M-Instruct`` prints one JSON object: for each
setting, the median tokens per second of the embedded engine and the median seconds of a forward and backward pass,
alone and alongside a process that keeps two threads busy. All settings take turns.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from torch_engine import Embedded, random_prompts  # benchmarks/torch_engine.py

# GNU's OpenMP spins 300,000 times before a waiting thread sleeps, unless one of these is set.
SETTINGS = {
    "default": {},
    "spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--train-tokens", type=int, default=256, help="tokens of a forward and backward pass")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


state: dict[str, Any] = {}  # the engine or trainer that a contender's process has loaded


def load(environment: Mapping[str, str], path: str, dtype_name: str, threads: int) -> None:
    """Load the model in a process whose OpenMP starts under ``environment``."""
    import torch
    from transformers import AutoModelForCausalLM

    assert environment.items() <= os.environ.items()
    torch.set_num_threads(threads)
    dtype = getattr(torch, dtype_name)
    state["engine"] = Embedded(path, dtype, "cpu")
    state["model"] = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def generate(sequences: int, new_tokens: int, vocab_size: int) -> float:
    """Return the engine's tokens per second."""
    prompts = random_prompts(sequences // 4, 32, vocab_size)
    start = time.perf_counter()
    tokens = state["engine"].run(prompts, 4, new_tokens)
    return tokens / (time.perf_counter() - start)


def train(tokens: int, vocab_size: int) -> float:
    """Return the seconds of a forward and backward pass over one row."""
    import torch

    ids = torch.randint(3, vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    state["model"](input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - start
    state["model"].zero_grad()
    return seconds


def keep_busy(threads: int) -> None:
    """Use ``threads`` cores until the process is ended; hashing releases Python's lock."""

    def work() -> None:
        block = bytes(1 << 22)
        while True:
            hashlib.sha256(block).digest()

    for _ in range(threads):
        threading.Thread(target=work, daemon=True).start()
    threading.Event().wait()


def start_contender(environment: Mapping[str, str], args: argparse.Namespace) -> ProcessPoolExecutor:
    """Start a process with ``environment``, which OpenMP reads when it starts."""
    os.environ.update(environment)
    try:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(
            1, context, initializer=load, initargs=(environment, args.model, args.dtype, args.threads)
        )
        pool.submit(os.getpid).result()
    finally:
        for name in environment:
            del os.environ[name]
    return pool


def main() -> None:
    args = parse()
    from transformers import AutoConfig

    vocab_size = AutoConfig.from_pretrained(args.model).get_text_config().vocab_size
    contenders = {name: start_contender(environment, args) for name, environment in SETTINGS.items()}
    measurements: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for repeat in range(args.repeats + 1):  # the first is warm-up
        for beside in ("alone", "alongside a busy process"):
            neighbor = multiprocessing.get_context("spawn").Process(target=keep_busy, args=(args.threads,), daemon=True)
            if beside != "alone":
                neighbor.start()
            for name, pool in contenders.items():
                speed = pool.submit(generate, args.sequences, args.new_tokens, vocab_size).result()
                seconds = pool.submit(train, args.train_tokens, vocab_size).result()
                if repeat:
                    measurements[name].setdefault(f"tokens per second, {beside}", []).append(speed)
                    measurements[name].setdefault(f"seconds of a pass, {beside}", []).append(seconds)
            if neighbor.is_alive():
                neighbor.terminate()
                neighbor.join()
    for pool in contenders.values():
        pool.shutdown()
    medians = {
        name: {what: round(statistics.median(values), 3) for what, values in rows.items()}
        for name, rows in measurements.items()
    }
    print(json.dumps(medians, indent=2))


if __name__ == "__main__":
    main()
