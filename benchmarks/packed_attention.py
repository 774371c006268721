"""Compare the CPU time of attention, forward and backward: two matrix products and PyTorch's fused kernel.

``python benchmarks/packed_attention.py`` prints one JSON object: medians for rows of several lengths at a constant
number of tokens per micro-batch, and how many times faster the short-row path of miles.training.packed_attention is.
The two take turns on one thread, with the memory settings of a worker. Training uses the short-row path up to length
``SHORT`` of that module.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from miles.run.cpu_tuning import malloc_environment
from miles.training import packed_attention
from miles.training.packed_attention import PackedLayout

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[54, 128, 512, 1024], help="tokens per row")
    parser.add_argument("--tokens", type=int, default=4096, help="total tokens of all rows")
    parser.add_argument(
        "--heads", type=int, default=9, help="attention heads; the defaults are the shape of SmolLM2-135M"
    )
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64, help="width of a head")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


def inputs(args: argparse.Namespace, length: int) -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output, each [rows, heads, length, width]."""
    generator = torch.Generator().manual_seed(0)
    rows = max(args.tokens // length, 1)
    heads = [args.heads, args.kv_heads, args.kv_heads, args.heads]
    shapes = [(rows, h, length, args.width) for h in heads]
    return [torch.randn(shape, generator=generator).to(getattr(torch, args.dtype)) for shape in shapes]


def run(attention: Attention, tensors: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """Return the CPU seconds of one forward and backward, and the output with the gradients of query, key and value."""
    *leaves, grad = [t.detach().clone() for t in tensors]
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    start = time.process_time()
    output = attention(q, k, v)
    output.backward(grad)
    seconds = time.process_time() - start
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return seconds, [output.detach(), q.grad, k.grad, v.grad]


def compare(args: argparse.Namespace, length: int) -> dict[str, float]:
    """Assert that both give the same result; return the medians in milliseconds and their ratio."""
    scaling = args.width**-0.5
    tensors = inputs(args, length)
    rows = len(tensors[0])
    layout = PackedLayout.of_packed(np.arange(rows * length), [length] * rows, torch.device("cpu"))
    with mock.patch.object(packed_attention, "SHORT", length):
        cells = layout.short_cells(None, args.heads, args.kv_heads)
    assert cells is not None

    def short(*rows_of: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in rows_of)
        out = packed_attention._short_attention(q, k, v, cells, scaling)
        return out.view(rows, length, args.heads, args.width).transpose(1, 2)

    contenders: dict[str, Attention] = {
        "fused": lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=args.heads != args.kv_heads
        ),
        "short": short,
    }
    # They round differently: the products of the short path are bf16, its softmax fp32.
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if args.dtype == "float32" else {"rtol": 0.05, "atol": 0.1}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(args.repeats + 1):  # the first is warm-up
        results = {name: run(attention, tensors) for name, attention in contenders.items()}
        for ours, theirs in zip(results["short"][1], results["fused"][1], strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)
        if repeat:
            for name, (taken, _) in results.items():
                seconds[name].append(taken)
    median = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    return {
        "length": length,
        "rows": len(tensors[0]),
        "fused_ms": round(median["fused"], 2),
        "short_ms": round(median["short"], 2),
        "ratio": round(median["fused"] / median["short"], 2),
    }


def main() -> None:
    args = parse()
    if memory := malloc_environment("cpu", os.environ):  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | memory)
    torch.set_num_threads(1)
    rows = [compare(args, length) for length in args.lengths]
    print(json.dumps({"dtype": args.dtype, "SHORT": packed_attention.SHORT, "results": rows}))


if __name__ == "__main__":
    main()
