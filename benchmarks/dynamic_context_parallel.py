"""Compare static and dynamic context parallelism in one run: one long sequence among many short ones.

    python benchmarks/dynamic_context_parallel.py [--ranks 2] [--long 2048] [--short 64] [--count 64] [--repeats 5]

Static splits every sequence over all ranks, because the long one needs it. Dynamic splits only the long one. Both run
the production forward and backward pass over gloo on the same batch, with equal gradients (tests/fast/conformance).
They take turns; medians are printed. ``exchanged`` counts the tokens whose keys and values every layer gathers.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.cluster import ClusterArguments
from miles.config.model import ModelArguments
from miles.config.parallel import ParallelArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.settings import LossArguments
from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Trainer
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch, TrainShard

VOCABULARY, PROMPT = 512, 8


def make_batch(lengths: list[int]) -> TrainBatch:
    """Return one sample of each length, each with its own prompt."""
    rng = np.random.default_rng(0)
    groups = []
    for number, length in enumerate(lengths):
        prompt = Prompt("", tuple(rng.integers(0, VOCABULARY, PROMPT).tolist()))
        response = rng.integers(0, VOCABULARY, length - PROMPT).tolist()
        sample = Sample(
            prompt,
            number,
            number,
            response_ids=response,
            loss_mask=[1] * len(response),
            rollout_log_probs=[-4.0] * len(response),
            reward=float(rng.normal()),
        )
        groups.append(PromptGroup(number, prompt, [sample]))
    loss = LossArguments(disable_rewards_normalization=True)
    return convert(groups, loss=loss, global_batch_size=len(lengths))[0]


def layouts(options: argparse.Namespace) -> dict[str, tuple[TrainingArguments, ParallelArguments]]:
    """Return both layouts, with the token budget per rank that the long sequence needs."""
    budget = -(-options.long // (2 * options.ranks)) * 2
    return {
        "static": (
            TrainingArguments(use_dynamic_batch_size=True, max_tokens_per_gpu=budget),
            ParallelArguments(context_parallel_size=options.ranks),
        ),
        "dynamic": (
            TrainingArguments(),
            ParallelArguments(dynamic_context_parallel=True, max_seqlen_per_dp_cp_rank=budget),
        ),
    }


def exchanged(shard: TrainShard) -> int:
    """Count the tokens of micro-batches that several ranks share."""
    lengths = shard.batch.total_lengths
    return sum(lengths[i] for plan in shard.micro_batches if plan.context_parallel_size > 1 for i in plan.samples)


def measure(rank: int, options: argparse.Namespace, folder: Path, out: Path) -> None:
    """Run one rank: build the model once per layout, and measure the layouts in turn."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    batch = make_batch([options.long, *[options.short] * options.count])
    runs = {}
    for name, (training, parallel) in layouts(options).items():
        settings = Settings(
            cluster=ClusterArguments(actor_num_gpus_per_node=options.ranks),
            model=ModelArguments(hf_checkpoint=str(folder / "model")),
            loss=LossArguments(disable_rewards_normalization=True),
            training=training,
            parallel=parallel,
        )
        shard = schedule_step(batch, options.ranks, training, parallel)[rank]
        backend = FsdpBackend(settings, torch.device("cpu"), 1)
        runs[name] = (Trainer(backend, settings.loss, settings.dims.token_ranks).policy, shard)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.repeats + 1):
        for name, (policy, shard) in runs.items():
            dist.barrier()
            started = time.perf_counter()
            policy.model.forward_backward(shard, policy.loss_function)
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
            policy.optimizer.skip()
    if rank == 0:
        median = {name: statistics.median(times[1:]) for name, times in seconds.items()}  # the first is warm-up
        result = {
            "median_seconds": median,
            "static_over_dynamic": median["static"] / median["dynamic"],
            "micro_batches": {name: len(shard.micro_batches) for name, (_, shard) in runs.items()},
            "exchanged": {name: exchanged(shard) for name, (_, shard) in runs.items()},
        }
        out.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks, wait for them, and print the measurements of the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--long", type=int, default=2048, help="tokens of the long sequence")
    parser.add_argument("--short", type=int, default=64, help="tokens of a short one")
    parser.add_argument("--count", type=int, default=64, help="how many short ones")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=options.long,
        )
        LlamaForCausalLM(config).save_pretrained(folder / "model")
        out = folder / "result.json"
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=measure, args=(rank, options, folder, out)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank failed: {[process.exitcode for process in ranks]}")
        print(out.read_text(), end="")


if __name__ == "__main__":
    main()
