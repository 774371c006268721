"""Compare a training step on FSDP2 and Megatron-Core by phase: one model, one batch, in one run.

    python benchmarks/backends.py --model outputs/models/SmolLM2-135M-Instruct
    python benchmarks/backends.py --model … --ranks 2 --megatron '--tensor-model-parallel-size 2'

The batch has the shape of the quickstart's: 8 prompts x 8 samples of 12 new tokens, all with an advantage. Each backend
runs in its own processes, built from the flags of train.py. A step is one iteration of the trainer: reference
log-probs, forward and backward, optimizer, and the export of the weights. The backends take turns, so that a busy
machine slows both. The first step of a turn is not counted, because a virtual machine's host may have reclaimed the
memory meanwhile. Prints medians and their ratio. ``cpu`` is the processor time of a step on rank 0, summed over
threads: if it is far below the step's seconds times the threads, other jobs used the cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.run.cpu_tuning import malloc_environment, use_threads
from miles.training.backend import build_backend
from miles.training.trainer import Trainer
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch

PROMPTS = Path(__file__).parents[1] / "examples" / "from_scripts" / "problems.jsonl"  # a file that exists; not read
STEPS_PER_TURN = 4
PHASES = ("log_probs", "forward_backward", "optimizer", "export", "step", "cpu")


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--ranks", type=int, default=1, help="trainer ranks of each backend")
    parser.add_argument("--fsdp", default="", help="more flags of train.py for --train-backend fsdp")
    parser.add_argument("--megatron", default="", help="more flags of train.py for --train-backend megatron")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="samples per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--fp32", action="store_true", help="compute in fp32 instead of bf16")
    parser.add_argument(
        "--turns", type=int, default=3, help=f"turns of {STEPS_PER_TURN} steps; the first step is not counted"
    )
    return parser.parse_args()


def settings_of(backend: str, options: argparse.Namespace) -> Settings:
    """Return the settings that train.py would derive from these flags."""
    words = f"""
        --device cpu --train-backend {backend} --hf-checkpoint {shlex.quote(options.model)} --colocate
        --actor-num-gpus-per-node {options.ranks} --prompt-data {shlex.quote(str(PROMPTS))}
        --input-key prompt --label-key label --rm-type exact_match --num-rollout 1000
        --rollout-batch-size {options.prompts} --n-samples-per-prompt {options.samples}
        --rollout-max-response-len {options.new_tokens} --lr 1e-6 --lr-decay-style constant
        --use-kl-loss --kl-loss-type low_var_kl --use-dynamic-batch-size --max-tokens-per-gpu 4096
        {"--fp32" if options.fp32 else "--bf16"} {getattr(options, backend)}
    """
    return validate(parse(shlex.split(words))).settings


def random_batch(settings: Settings, options: argparse.Namespace, vocabulary: int) -> TrainBatch:
    """Return samples of random tokens. The engine's log-probs do not matter in the first step of an iteration."""
    rng = np.random.default_rng(0)
    groups = []
    for number in range(options.prompts):
        prompt = Prompt("", tuple(rng.integers(3, vocabulary, options.prompt_tokens).tolist()))
        samples = [
            Sample(
                prompt,
                number,
                number * options.samples + i,
                response_ids=rng.integers(3, vocabulary, options.new_tokens).tolist(),
                loss_mask=[1] * options.new_tokens,
                rollout_log_probs=[-4.0] * options.new_tokens,
                reward=float(rng.normal()),
            )
            for i in range(options.samples)
        ]
        groups.append(PromptGroup(number, prompt, samples))
    return convert(groups, loss=settings.loss, global_batch_size=settings.global_batch_size)[0]


def serve(name: str, options: argparse.Namespace, rank: int, folder: str, orders: Connection) -> None:
    """Run one rank: take a step per order, answer with the seconds of its phases, and end at None."""
    use_threads("cpu", sharers=options.ranks)
    store = dist.FileStore(str(Path(folder) / f"store of {name}"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    settings = settings_of(name, options)
    vocabulary = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    batch = random_batch(settings, options, vocabulary)
    shards = schedule_step(batch, settings.dims.token_ranks, settings.training, settings.parallel)
    shard = shards[settings.dims.token_rank(rank)]
    backend = build_backend(settings, torch.device("cpu"), total_steps=1000)
    trainer = Trainer(backend, settings.loss, settings.dims.token_ranks)
    orders.send("built")
    while orders.recv():
        dist.barrier()
        started, used = time.perf_counter(), time.process_time()
        (metrics,) = trainer.train([shard])
        trained = time.perf_counter()
        for _ in backend.export_weights():
            continue
        dist.barrier()
        done, used = time.perf_counter(), time.process_time() - used
        seconds = {phase: metrics[f"time/{phase}"].value for phase in PHASES[:3]}
        orders.send(seconds | {"export": done - trained, "step": done - started, "cpu": used})
    dist.destroy_process_group()


class Contender:
    """One backend in its own processes."""

    def __init__(self, name: str, options: argparse.Namespace, folder: str) -> None:
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
        spawn = multiprocessing.get_context("spawn")
        self._orders: list[Connection] = []
        self._ranks = []
        for rank in range(options.ranks):
            ours, theirs = spawn.Pipe()
            self._orders.append(ours)
            self._ranks.append(spawn.Process(target=serve, args=(name, options, rank, folder, theirs)))
            self._ranks[-1].start()
            theirs.close()  # so that a rank that dies raises EOFError here instead of an endless wait
        for orders in self._orders:
            orders.recv()

    def step(self, counts: bool) -> float:
        """Take one step and return its seconds on rank 0."""
        for orders in self._orders:
            orders.send(True)
        answers = [orders.recv() for orders in self._orders]
        for phase, seconds in answers[0].items():
            self.seconds[phase] += [seconds] if counts else []
        return answers[0]["step"]

    def close(self) -> None:
        for orders in self._orders:
            orders.send(None)
        for process in self._ranks:
            process.join()


def main() -> None:
    options = options_given()
    os.environ |= malloc_environment("cpu", os.environ)  # as in trainer processes
    with tempfile.TemporaryDirectory() as folder:
        contenders = {name: Contender(name, options, folder) for name in ("fsdp", "megatron")}
        for turn in range(options.turns + 1):  # the first is warm-up
            for name, contender in contenders.items():
                for step in range(STEPS_PER_TURN):
                    seconds = contender.step(counts=turn > 0 and step > 0)
                    print(f"{name} {seconds:.1f} s", file=sys.stderr, flush=True)
        for contender in contenders.values():
            contender.close()
    median = {
        name: {phase: round(statistics.median(times), 3) for phase, times in contender.seconds.items()}
        for name, contender in contenders.items()
    }
    ratio = {phase: round(median["megatron"][phase] / median["fsdp"][phase], 2) for phase in PHASES}
    shape = f"{options.prompts} x {options.samples} samples, {options.prompt_tokens} + {options.new_tokens} tokens"
    result = {"batch": shape, "ranks": options.ranks, "dtype": "fp32" if options.fp32 else "bf16"}
    print(json.dumps({**result, "median_seconds": median, "megatron_over_fsdp": ratio}, indent=2))


if __name__ == "__main__":
    main()
