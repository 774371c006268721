"""Measure each lever of a quickstart step: processor seconds with it and without it, alternately in one process.

    python benchmarks/levers.py --model outputs/models/SmolLM2-135M-Instruct --samples outputs/quickstart/samples.jsonl
    python benchmarks/levers.py … --only adamw     those whose names contain this

The batch is an iteration that a quickstart has recorded: 8 prompts x 8 samples of at most 12 tokens, which begin alike.
A lever is an entry of ``LEVERS``, which names the part of a step that it changes. Most are switched inside the process,
by replacing a function or a constant of miles; ``patched`` fails if that function is not called. Levers of the
environment, which glibc reads when a process starts, have a process of their own, and the two take turns. ``TRIED`` are
ideas that miles does not follow, measured the same way: there, the replacement is with the idea.

Prints one JSON object: medians over the repeats, after a pass for warm-up. ``times`` states how many times as fast the
part is with the lever. All passes run on one thread, so processor seconds do not count threads that wait.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lever_bench import PARTS, Bench, Change, Lever, constant, function, patched, recorded  # benchmarks/lever_bench.py
from levers_tried import BOTH, RETURNED, TRIED  # benchmarks/levers_tried.py
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from miles.base.host import has_bf16
from miles.batch import collate as collating
from miles.engine.base import SamplingParams
from miles.engine.embedded import attention, model_runner, running_batch, sampling
from miles.engine.embedded import model_runner as fused_layers
from miles.objective import token_log_probs
from miles.run.cpu_tuning import malloc_environment
from miles.training import packed_attention, scoring
from miles.training import trainer as training
from miles.training.fsdp import models, plain_layers, runner
from miles.types.train_batch import TrainBatch

# The ways without a lever.

_share_prefixes = collating._share_prefixes
_needs_of = scoring.needs_of


def nothing_shared(part: TrainBatch, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``collate._share_prefixes`` that keeps every token of every sample."""
    return np.arange(lengths.sum()), np.arange(lengths.sum())


def prompts_shared(part: TrainBatch, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``collate._share_prefixes`` that keeps a prompt of several samples once, and nothing else."""
    numbers: dict[bytes, int] = {}
    tokens = []
    for i, (ids, length) in enumerate(zip(part.tokens, part.response_lengths, strict=True)):
        prompt, response = np.split(ids.astype(np.int64), [len(ids) - length])
        number = numbers.setdefault(prompt.tobytes(), len(numbers))
        tokens.append(np.concatenate([prompt + (number << 32), response + ((len(part) + i) << 32)]))
    return _share_prefixes(replace(part, tokens=tokens), lengths)


def whole_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    chunk_size: int,
    bias: torch.Tensor | None = None,
    with_entropy: bool = False,
    fp32: bool = False,
    support: Any = None,
    shared: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``chunked_log_probs`` from all logits in fp32, with autograd's operations, entropy after log-probs."""
    logits = F.linear(hidden, weight, bias).float() / temperature
    row = torch.arange(len(targets)) if shared is None else shared.row
    log_probs = logits.log_softmax(-1)[row, targets]
    log_p = logits.log_softmax(-1) if with_entropy else None
    return log_probs, None if log_p is None else -(log_p.exp() * log_p).sum(-1)[row]


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cells: Any, scaling: float) -> torch.Tensor:
    """``_short_attention`` with autograd's operations."""
    sharers, width = q.shape[1] // k.shape[1], v.shape[2]
    index = cells.queries, cells.keys, cells.keys
    rows = [
        x.reshape(-1, size).index_select(0, i)
        for x, i, size in zip((q, k, v), index, (sharers * q.shape[2], k.shape[2], width), strict=True)
    ]
    results = []
    for block in cells.blocks:
        bq, bk, bv = packed_attention._of_block(block, *rows)
        shares = (block.mask + (bq @ bk.mT).float() * scaling).softmax(-1)
        results.append((shares.to(v.dtype) @ bv).reshape(-1, sharers * width))
    out = torch.cat([*results, q.new_zeros(1, sharers * width)])
    return out.index_select(0, cells.of_tokens).view(*q.shape[:2], width)


@contextmanager
def layers_of_transformers(bench: Bench) -> Iterator[None]:
    """Let transformers compute norms and rotary positions."""
    models_of = (bench.backend.policy, bench.backend.reference)
    modules = [module for model in models_of for module in model.module.modules() if _is_replaced(module)]
    if not modules:
        raise LookupError("compute_with_few_operations replaces nothing here: change the lever as the code was changed")
    replaced = [vars(module).pop("forward") for module in modules]
    try:
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            module.forward = forward


def _is_replaced(module: torch.nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) in (plain_layers._norm, plain_layers._attention)


@contextmanager
def copied_gradients(bench: Bench) -> Iterator[None]:
    """Let FSDP2 reduce the gradients of one rank as it reduces the gradients of several."""
    modules = [module for module in bench.backend.policy.module.modules() if isinstance(module, FSDPModule)]
    groups = [group for module in modules for group in module._get_fsdp_state()._fsdp_param_groups]
    before = [group._reduce_scatter_comm for group in groups]
    if not all(isinstance(reduction, models.NothingToReduce) for reduction in before):
        raise LookupError("shard_model no longer uses NothingToReduce: change the lever as the code was changed")
    for group in groups:
        group._reduce_scatter_comm, group.gradient_divide_factor = DefaultReduceScatter(), 1.0
    try:
        yield
    finally:
        for group, reduction in zip(groups, before, strict=True):
            group._reduce_scatter_comm, group.gradient_divide_factor = reduction, None


@contextmanager
def adamw(bench: Bench, foreach: bool) -> Iterator[None]:
    """Step with AdamW's other implementations: operations over lists of tensors, or a loop over the tensors."""
    groups = bench.backend.policy.optimizer.adam.param_groups
    if not all(group["fused"] for group in groups):
        raise LookupError("the optimizer is not fused: change the lever as the code was changed")
    for group in groups:
        group["fused"], group["foreach"] = False, foreach
    try:
        yield
    finally:
        for group in groups:
            group["fused"], group["foreach"] = True, None


def zeros_trained(bench: Bench) -> AbstractContextManager[Any]:
    """Train on samples of advantage 0 as on the others."""
    return mock.patch.object(bench, "later_shard", bench.shard(bench.batches(bench.later)[0]))


class Own(tuple[int, ...]):
    """A prompt that equals itself alone, so that each sample has a separate row."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def own_rows(bench: Bench) -> AbstractContextManager[Any]:
    """Generate each sample from its own prompt."""
    return mock.patch.object(bench, "prompt_key", Own)


def row_by_row(logits: torch.Tensor, rows: sampling.RowSampling, uniforms: torch.Tensor) -> sampling.Drawn:
    """``sample`` for one row after the other."""
    one = sampling.RowSampling.of([SamplingParams(1)], logits.shape[1], logits.device)
    drawn = [sampling.sample(logits[i : i + 1], one, uniforms[i : i + 1]) for i in range(len(logits))]
    return sampling.Drawn(torch.cat([d.tokens for d in drawn]), torch.cat([d.log_probs for d in drawn]), {})


def plain_load(product: Any, weight: torch.Tensor) -> None:
    """``_Product.load`` that keeps the weight unchanged."""
    product._weight = weight.to(product.emptied.dtype).contiguous().clone()


def engine_built_with(owner: Any, name: str, value: Callable[..., Any]) -> Change:
    """Return the change to an engine that was built while a function was replaced."""

    def change(bench: Bench) -> AbstractContextManager[Any]:
        return mock.patch.object(bench, "runner", bench.engine(name, patched(owner, name, value)))

    return change


LEVERS = (
    Lever(
        "memory kept",
        (*BOTH, "optimizer"),
        "glibc keeps what is freed; without, it returns blocks above 2 MiB, whose pages the kernel clears",
        environment=RETURNED,
    ),
    Lever(
        "tokens that samples begin with, computed once",
        BOTH,
        "without, every token of every sample is computed",
        function(collating, "_share_prefixes", nothing_shared),
    ),
    Lever(
        "beginnings of responses and of different prompts, too",
        BOTH,
        "without, equal prompts alone are computed once",
        function(collating, "_share_prefixes", prompts_shared),
    ),
    Lever(
        "attention from shared tokens once, too",
        BOTH,
        "without, each sample computes the attention of all its tokens",
        function(packed_attention, "_without_repeated_queries", lambda spans, packed: iter(spans)),
    ),
    Lever(
        "last tokens left out",
        BOTH,
        "the last token of a response predicts nothing; without, it is computed",
        function(runner, "collate", partial(collating.collate, reads_last=True)),
    ),
    Lever(
        "tokens padded to a multiple of 8",
        BOTH,
        "which suits oneDNN's products; without, there are as many rows as tokens",
        constant(collating, "TOKEN_MULTIPLE", 1),
    ),
    Lever(
        "attention over short rows as two products",
        BOTH,
        "without, PyTorch's fused kernel",
        constant(packed_attention, "SHORT", 0),
    ),
    Lever(
        "that attention with its derivatives written out",
        BOTH,
        "gradients of keys are added up once; without, autograd's operations",
        function(packed_attention, "_short_attention", plain_attention),
    ),
    Lever(
        "that attention a few rows at once",
        BOTH,
        "1 MB of fp32 scores stays in the cache; without, all rows of similar length",
        constant(packed_attention, "CACHED_BYTES", 1 << 60),
        half=True,
    ),
    Lever(
        "the same, where memory is returned",
        ("forward and backward",),
        "as on a host with less than 16 GiB",
        constant(packed_attention, "CACHED_BYTES", 1 << 60),
        environment=RETURNED,
        half=True,
    ),
    Lever(
        "norms and rotary positions with few operations",
        BOTH,
        "without, transformers' operations",
        layers_of_transformers,
    ),
    Lever(
        "log-probs and entropy from logits that are not whole in fp32",
        BOTH,
        "with their gradient in closed form; without, autograd's log-softmax of all logits in fp32",
        function(models, "chunked_log_probs", whole_logits),
    ),
    Lever(
        "logits converted to fp32 a few rows at once",
        BOTH,
        "without, chunk by chunk",
        constant(token_log_probs, "CACHED_BYTES", 0),
        half=True,
    ),
    Lever(
        "logits the same way, where memory is returned",
        ("forward and backward",),
        "as on a host with less than 16 GiB",
        constant(token_log_probs, "CACHED_BYTES", 0),
        environment=RETURNED,
        half=True,
    ),
    Lever(
        "no copy of gradients on one rank",
        ("forward and backward",),
        "without, FSDP2 copies and divides them, as on several ranks",
        copied_gradients,
    ),
    Lever("fused AdamW", ("optimizer",), "without, `foreach`", partial(adamw, foreach=True)),
    Lever("fused AdamW, not a loop", ("optimizer",), "without, a loop over the tensors", partial(adamw, foreach=False)),
    Lever(
        "no gradient for samples of advantage 0",
        ("a later step",),
        "they are scored; without, they are trained on",
        zeros_trained,
    ),
    Lever(
        "old log-probs only from the second step on",
        ("a step",),
        "in the first they are the current ones; without, they are computed",
        function(training, "needs_of", lambda *given: replace(_needs_of(*given), old_log_probs=True)),
    ),
    Lever(
        "prompt prefilled once for its samples",
        ("prefill",),
        "without, each sample's prompt is run",
        own_rows,
    ),
    Lever(
        "common start of the prompts run once",
        ("prefill",),
        "without, every prompt is run from its first token on",
        constant(model_runner, "SAVED_BY_PREFIX", 1 << 60),
    ),
    Lever(
        "equal beginnings decoded once",
        ("decoding",),
        "samples are one row as long as their tokens are equal; without, each has a row",
        own_rows,
    ),
    Lever(
        "attention of a decoding step as two products",
        ("decoding",),
        "over whole buffers of the cache; without, PyTorch's fused kernel",
        constant(attention, "MANY_ROWS", 1 << 60),
    ),
    Lever(
        "fused layers",
        ("prefill", "decoding"),
        "products apply SiLU, multiply and add before they round; without, transformers' layers",
        engine_built_with(model_runner, "can_fuse", lambda model: False),
    ),
    Lever(
        "weights in oneDNN's layout",
        ("prefill", "decoding"),
        "made at each update; without, in each product",
        engine_built_with(fused_layers._Product, "load", plain_load),
    ),
    Lever(
        "tokens drawn for all rows together",
        ("drawing",),
        "without, row by row",
        function(running_batch, "sample", row_by_row),
    ),
    Lever(
        "exponentials summed in memory that stays in the cache",
        ("drawing",),
        "without, of all rows at once",
        constant(sampling, "CACHED_BYTES", 1 << 60),
    ),
)


BY_NAME = {lever.name: lever for lever in (*LEVERS, *TRIED)}
assert len(BY_NAME) == len(LEVERS) + len(TRIED), "a name occurs twice"

benches: list[Bench] = []  # the one of a worker process


def prepare(options: argparse.Namespace) -> None:
    """Build the bench of this worker process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    benches.append(Bench(options.model, recorded(options.samples, options.model), options.dtype))


@contextmanager
def call_of(bench: Bench, name: str, part: str, with_it: bool) -> Iterator[Any]:
    """Yield the call that computes a part with a lever or without it, and change the code meanwhile."""
    lever = BY_NAME[name]
    if lever.pair is not None:
        yield bench.pair(lever.pair)[0 if with_it else 1]
        return
    change = lever.change if with_it == (lever in TRIED) else None
    with change(bench) if change is not None else nullcontext():
        yield PARTS[part](bench)


def seconds_of(name: str, part: str, with_it: bool) -> tuple[float, float]:
    """Compute a part in this worker process; returns its processor seconds and its seconds."""
    with call_of(benches[0], name, part, with_it) as call:
        gc.collect()
        started, used = time.perf_counter(), time.process_time()
        call()
        return time.process_time() - used, time.perf_counter() - started


def peak_gib() -> float:
    """Return the largest memory that this worker process had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def ask_bench(question: Any) -> Any:
    """Return what ``question`` finds at the bench of this worker process."""
    return question(benches[0])


class Worker:
    """A process with a bench, and with its own environment."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str]) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=prepare, initargs=(options,))
        with mock.patch.dict(os.environ, environment):
            for name in [name for name in environment if not environment[name]]:
                del os.environ[name]
            self._pool.submit(int).result()  # starts the process

    def run(self, function: Any, *arguments: Any) -> Any:
        """Run the function in the process, and return its result."""
        return self._pool.submit(function, *arguments).result()

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def measure(lever: Lever, part: str, workers: tuple[Worker, Worker], repeats: int) -> dict[str, Any]:
    """Return the medians of a part with the lever and without it: the workers that have it, and that lack it."""
    timings: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
    for repeat in range(repeats + 1):
        for way, worker in zip(timings, workers, strict=True):
            timings[way].append(worker.run(seconds_of, lever.name, part, way == "with"))
            took = f"{timings[way][-1][0]:.2f} processor seconds" + ("" if repeat else ", warm-up")
            print(f"{lever.name}: {part} {way} it {took}", file=sys.stderr, flush=True)
    cpu, wall = (
        {way: statistics.median(times[kind] for times in of_way[1:]) for way, of_way in timings.items()}
        for kind in (0, 1)
    )
    if lever.tokens_per_pass is not None:
        per_pass = workers[0].run(ask_bench, lever.tokens_per_pass)
        cpu["with"], wall["with"] = cpu["with"] / per_pass, wall["with"] / per_pass
    first = {way: of_way[0][1] for way, of_way in timings.items()}
    times = {"times": cpu["without"] / cpu["with"], "wall_times": wall["without"] / wall["with"]}
    return times | {"processor_seconds": cpu, "wall_seconds": wall, "first_wall_seconds": first}


def measured(lever: Lever, options: argparse.Namespace, base: Worker) -> list[dict[str, Any]]:
    """Return the figures of each part of a lever."""
    head = {"lever": lever.name, "what": lever.what, "tried": lever in TRIED}
    if lever.tokens is not None:
        few, many = base.run(ask_bench, lever.tokens)
        return [head | {"part": lever.parts[0], "times": many / few, "tokens": {"with": few, "without": many}}]
    other = base
    if lever.environment is not None:
        other = Worker(options, os.environ | malloc_environment("cpu", os.environ) | lever.environment)
    with_it, without = (other, base) if lever in TRIED else (base, other)
    workers = (other, other) if lever.change is not None else (with_it, without)
    rows = [head | {"part": part} | measure(lever, part, workers, options.repeats) for part in lever.parts]
    if other is not base:
        if lever.change is None:  # each worker has computed one way
            peaks = {"with": with_it.run(peak_gib), "without": without.run(peak_gib)}
            rows = [row | {"peak_gib": peaks} for row in rows]
        other.close()
    return rows


def rounded(value: Any) -> Any:
    """Return ``value`` with four digits of each number."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--samples", required=True, type=Path, help="samples.jsonl of a quickstart")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16" if has_bf16() else "float32")
    parser.add_argument("--repeats", type=int, default=3, help="passes that count, with each lever and without it")
    parser.add_argument("--only", default="", metavar="NAME", help="measure the levers whose names contain this")
    return parser.parse_args()


def main() -> None:
    options = parse()
    chosen = [lever for name, lever in BY_NAME.items() if options.only.lower() in name.lower()]
    chosen = [lever for lever in chosen if not lever.half or options.dtype == "bfloat16"]
    chosen.sort(key=lambda lever: lever.environment is None)  # first those for which two processes hold a model
    base = Worker(options, os.environ | malloc_environment("cpu", os.environ))
    rows = {lever.name: measured(lever, options, base) for lever in chosen}
    base.close()
    order = [name for name in BY_NAME if name in rows]
    print(json.dumps({"dtype": options.dtype, "levers": [rounded(row) for name in order for row in rows[name]]}))


if __name__ == "__main__":
    main()
