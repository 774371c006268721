"""Measure the schedule of one large step: seconds and memory for a million samples over thousands of ranks.

    python benchmarks/schedule_scale.py --samples 1000000 --ranks 4096

Makes groups of eight samples with responses of random length, a tenth of them at the limit, converts them to columns,
and schedules the step three ways. Prints one JSON object: seconds of wall time and of processor time, and the memory of
the process before and at the peak of each part. ``samples_in_shards`` counts the samples of all different shards: what
the object store holds.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from miles.batch.schedule import schedule_step
from miles.config.parallel import ParallelArguments
from miles.config.training import TrainingArguments
from miles.types.train_batch import TrainBatch

T = TypeVar("T")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--group", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--response-tokens", type=int, default=32, help="the limit of a response")
    parser.add_argument("--only", help="measure the ways whose name has this in it")
    return parser.parse_args()


def step_of(options: argparse.Namespace) -> TrainBatch:
    """Return the columns of one step."""
    rng = np.random.default_rng(0)
    n, limit = options.samples, options.response_tokens
    responses = np.minimum(limit, 1 + rng.lognormal(np.log(limit / 3), 0.8, n).astype(np.int64))
    prompts = rng.integers(0, 50_000, (-(-n // options.group), options.prompt_tokens))
    lengths = responses.tolist()
    ones, zeros = np.ones(limit, np.float32), np.zeros(limit, np.float32)
    tokens = rng.integers(0, 50_000, limit)
    return TrainBatch(
        tokens=[np.concatenate([prompts[i // options.group], tokens[:length]]) for i, length in enumerate(lengths)],
        response_lengths=lengths,
        loss_masks=[ones[:length] for length in lengths],
        rollout_log_probs=[zeros[:length] for length in lengths],
        rewards=rng.normal(size=n).tolist(),
        sample_denoms=responses.astype(float).tolist(),
        trajectory_token_counts=responses.astype(float).tolist(),
        group_indices=(np.arange(n) // options.group).tolist(),
        trajectory_ids=list(range(n)),
        position_in_step=list(range(n)),
        num_trajectories=n,
        num_loss_tokens=int(responses.sum()),
        expected_loss_mass=1.0,
    )


def memory() -> float:
    """Return the peak of this process's memory so far, in GB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2)


def measured(work: Callable[[], T]) -> tuple[T, dict[str, float]]:
    started, used = time.perf_counter(), time.process_time()
    result = work()
    seconds, processor = time.perf_counter() - started, time.process_time() - used
    return result, {"seconds": round(seconds, 2), "processor_seconds": round(processor, 2), "peak_gb": memory()}


def main() -> None:
    options = parse()
    step = step_of(options)
    packed = TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=1024)
    ways = {
        "fixed micro-batches": (TrainingArguments(micro_batch_size=8), ParallelArguments()),
        "token budget": (packed, ParallelArguments()),
        "token budget, balanced": (
            TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=1024, balance_data=True),
            ParallelArguments(),
        ),
        "token budget, two ranks per sequence": (packed, ParallelArguments(context_parallel_size=2)),
    }
    result: dict[str, object] = {"samples": options.samples, "ranks": options.ranks, "columns_gb": memory()}
    for name, (training, parallel) in ways.items():
        if options.only is not None and options.only not in name:
            continue
        shards, figures = measured(partial(schedule_step, step, options.ranks, training, parallel))
        different = {id(shard): len(shard.batch) for shard in shards}
        result[name] = {**figures, "samples_in_shards": sum(different.values())}
        del shards
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
