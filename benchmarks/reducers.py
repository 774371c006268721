"""Compare the CPU time of the loss reducers with the CPU time of a loop over samples, forward and backward.

``python benchmarks/reducers.py`` prints one JSON object with the medians and their ratio. The loop is the usual form:
one slice, product and sum per sample. Both start from a packed micro-batch, so the time includes computing weights or
slices. They take turns on one thread, with the memory settings of a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch

from miles.batch.collate import collate
from miles.objective.aggregation import Aggregation, Reducer, get_pg_loss_reducer, step_denominators
from miles.objective.settings import LossArguments
from miles.run.cpu_tuning import malloc_environment
from miles.types.train_batch import MicroBatch, TrainBatch

GROUP = 8  # trajectories per prompt


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument(
        "--longest",
        type=int,
        nargs="+",
        default=[64, 256, 1024],
        help="largest response length; lengths are spread evenly from 1",
    )
    parser.add_argument("--loss-aggregation", choices=get_args(Aggregation), default="sample_mean")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


def step(mode: Aggregation, samples: int, longest: int) -> MicroBatch:
    """Return a whole step as one micro-batch: responses of 1 to ``longest`` tokens, a tenth of them masked."""
    random = np.random.default_rng(0)
    lengths = [int(n) for n in random.integers(1, longest, samples, endpoint=True)]
    masks = [(random.random(n) < 0.9).astype(np.float32) for n in lengths]
    rollouts, groups = list(range(samples)), [i // GROUP for i in range(samples)]
    counts = [int(mask.sum()) for mask in masks]
    denominators = step_denominators(
        mode, token_counts=counts, trajectory_ids=rollouts, group_indices=groups, divisor=float(longest)
    )
    batch = TrainBatch(
        tokens=[np.zeros(n + 1, np.int64) for n in lengths],  # the prompt is one token
        response_lengths=lengths,
        loss_masks=masks,
        rollout_log_probs=[np.zeros(n, np.float32) for n in lengths],
        rewards=[0.0] * samples,
        group_indices=groups,
        trajectory_ids=rollouts,
        position_in_step=rollouts,
        **vars(denominators),
    )
    return collate(batch, range(samples), torch.device("cpu"))


def loop_over_samples(micro: MicroBatch) -> Reducer:
    """Return a reducer that computes the same objective sample by sample: ``1/N sum_i S_i / sample_denoms[i]``."""
    lengths = list(micro.response_lengths)
    masks, denominators = micro.loss_mask.split(lengths), micro.sample_denoms.unbind()

    def reduce(values: torch.Tensor) -> torch.Tensor:
        columns = zip(values.split(lengths), masks, denominators, strict=True)
        of_samples = [(part * mask).sum() / denominator for part, mask, denominator in columns]
        return torch.stack(of_samples).sum() / micro.num_trajectories

    return reduce


def run(
    make_reducer: Callable[[MicroBatch], Reducer], micro: MicroBatch, losses: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the CPU seconds of one forward and backward, the loss, and its gradient [R]."""
    leaf = losses.clone().requires_grad_()
    start = time.process_time()
    loss = make_reducer(micro)(leaf)
    loss.backward()
    seconds = time.process_time() - start
    assert leaf.grad is not None
    return seconds, loss.detach(), leaf.grad


def compare(mode: Aggregation, samples: int, longest: int, repeats: int) -> dict[str, float]:
    """Assert that both give the same values; return the medians in milliseconds and their ratio."""
    micro = step(mode, samples, longest)
    losses = torch.randn(len(micro.loss_mask), generator=torch.Generator().manual_seed(0))
    settings = LossArguments(loss_aggregation=mode, calculate_per_token_loss=mode == "token_mean")
    contenders = {"loop": loop_over_samples, "flat": lambda batch: get_pg_loss_reducer(settings, batch)}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):  # the first is warm-up
        results = {name: run(make_reducer, micro, losses) for name, make_reducer in contenders.items()}
        (_, flat_loss, flat_gradient), (_, loop_loss, loop_gradient) = results["flat"], results["loop"]
        torch.testing.assert_close(flat_loss, loop_loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(flat_gradient, loop_gradient, rtol=1e-5, atol=0.0)
        if repeat:
            for name, (taken, *_) in results.items():
                seconds[name].append(taken)
    median = {name: 1e3 * statistics.median(taken) for name, taken in seconds.items()}
    return {
        "longest": longest,
        "tokens": len(losses),
        "loop_ms": round(median["loop"], 2),
        "flat_ms": round(median["flat"], 2),
        "ratio": round(median["loop"] / median["flat"], 1),
    }


def main() -> None:
    args = parse()
    if memory := malloc_environment("cpu", os.environ):  # glibc reads it when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | memory)
    torch.set_num_threads(1)
    rows = [compare(args.loss_aggregation, args.samples, longest, args.repeats) for longest in args.longest]
    print(json.dumps({"samples": args.samples, "loss_aggregation": args.loss_aggregation, "results": rows}))


if __name__ == "__main__":
    main()
