"""Compare a weight update as a delta with one of all weights, after real optimizer steps.

``python benchmarks/weight_delta.py`` prints one JSON object: for each learning rate the share of elements that have
changed from one step to the next, the bytes that are written relative to all weights, and the seconds and the processor
seconds, of all threads, of

- disk: writing all weights as files, and reading them;
- disk-delta: comparing, writing the delta, applying it to a copy with all checksums, and reading the copy.

Both take turns after each step. The model has random weights unless ``--model`` names a folder. As in the trainer,
AdamW updates fp32 weights, and engines get them in bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from miles.engine.weight_sync.deltas import DeltaWriter, LocalCopy, chunks_in
from miles.engine.weight_sync.disk import DiskTransport
from miles.types.weights import WeightChunk, in_chunks

TOKENS = 64  # of a sequence
SIZES = {  # hidden, intermediate, layers, heads, key-value heads, vocabulary
    "tiny": (64, 192, 2, 4, 2, 1024),
    "135m": (576, 1536, 30, 9, 3, 49152),  # of SmolLM2-135M
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="135m", help="of a random model")
    parser.add_argument("--model", help="folder of a model, instead of a random one")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, default=5, help="measured steps per learning rate, after a first one")
    parser.add_argument("--folder", default="/dev/shm", help="where both write, so that no disk is measured")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(0)
    if args.model is not None:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    hidden, intermediate, layers, heads, kv_heads, vocabulary = SIZES[args.size]
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            tie_word_embeddings=True,
        )
    )


def exported(model: torch.nn.Module) -> list[WeightChunk]:
    return list(in_chunks((name, weight.detach().bfloat16()) for name, weight in model.named_parameters()))


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for chunk in chunks_in(folder) for name, tensor in chunk.tensors.items()}


def clocks() -> tuple[float, float]:
    """Return the time, and the processor time of this process."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds and the processor seconds since ``began``."""
    now, processor = clocks()
    return now - began[0], processor - began[1]


def measure(args: argparse.Namespace, lr: float) -> dict[str, float]:
    model = model_of(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    rows: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer, copy = DeltaWriter(Path(folder) / "delta"), LocalCopy(Path(folder) / "copy")
        whole = DiskTransport(Path(folder) / "whole")
        for step in range(1 + args.steps):
            tokens = torch.randint(model.config.vocab_size, (4, TOKENS))
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            chunks = exported(model)

            began = clocks()
            expected = read(Path(asyncio.run(whole.write(chunks, step)).path))
            disk = since(began)

            began = clocks()
            offer = writer.update(chunks)
            if offer is None:
                copy.adopt(chunks, "first")
                continue
            copy.follow(offer)
            actual = read(copy.folder)
            delta = since(began)

            assert actual.keys() == expected.keys()
            assert all(torch.equal(actual[name].view(torch.int16), expected[name].view(torch.int16)) for name in actual)
            rows.append(
                {
                    "changed_fraction": offer.changed / offer.elements,
                    "bytes_ratio": offer.bytes / offer.whole_bytes,
                    "whole_megabytes": offer.whole_bytes / 1e6,
                    "disk_seconds": disk[0],
                    "disk_processor_seconds": disk[1],
                    "disk_delta_seconds": delta[0],
                    "disk_delta_processor_seconds": delta[1],
                    "encode_seconds": offer.seconds,
                }
            )
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def main() -> int:
    args = parse()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(json.dumps({"threads": torch.get_num_threads(), **{f"lr {lr:g}": measure(args, lr) for lr in args.lr}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
