"""Measure a training step of one backend on one device: ``python train_step.py MODEL RESULT.json --backend fsdp``.

The step is a run's work on an iteration: log-probs if they are needed, forward and backward over the
micro-batches, and the optimizer. Writes one JSON object:

- ``seconds``: the median of the timed steps, with the device synchronized around each;
- ``tokens_per_second`` of tokens that the model computes, and ``mfu``, the share of the GPU's dense bf16 peak that the
  arithmetic of the model would take at that speed. Recomputed and elementwise work does not count;
- ``peak_memory_gib``, what ``--rehearse`` foresees of it, the largest tensor of a step, and the size of the whole
  logits of a micro-batch in fp32;
- ``idle_share``: how much of a profiled step no kernel was running.

``RESULT.txt`` gets the profiler's table of that step. A step that a GPU has too little memory for, as ``--rehearse``
foresees it, is skipped as ``run.sh`` reads it.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, PretrainedConfig

from miles.batch.convert import convert
from miles.batch.schedule import schedule_step
from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.run.launcher import FORESEEN, ForeseenMemory
from miles.training.backend import build_backend
from miles.training.trainer import Trainer
from miles.types.sample import Prompt, PromptGroup, Sample
from miles.types.train_batch import TrainBatch
from tests.gpu.devices import figures_of
from tests.gpu.run_tests import SKIPPED

PROMPT_TOKENS = 64
SPARE_GIB = 6  # of a GPU's memory: CUDA itself, and blocks that the allocator cannot use


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="Hugging Face folder")
    parser.add_argument("result", type=Path, help="JSON file to write")
    parser.add_argument("--backend", default="fsdp", choices=["fsdp", "megatron"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--flags", default="", help="more flags of train.py")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="tokens per micro-batch")
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--sample-tokens", type=int, default=2048, help="tokens of a sample, its prompt among them")
    parser.add_argument("--unequal", action="store_true", help="samples of an eighth of --sample-tokens up to it")
    parser.add_argument("--fused", action="store_true", help="Megatron's fused SwiGLU, which the backend leaves off")
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7)
    return parser.parse_args()


def settings_of(options: argparse.Namespace, samples: int) -> Settings:
    """Return the settings that train.py would derive from these flags."""
    words = f"""
        --device {options.device} --train-backend {options.backend} --hf-checkpoint {shlex.quote(options.model)}
        --colocate --actor-num-gpus-per-node 1 --num-rollout 1000
        --prompt-data {shlex.quote(str(Path(options.model).parent / "prompts.jsonl"))} --rm-type length
        --rollout-batch-size {samples // 2} --n-samples-per-prompt 2
        --rollout-max-response-len {options.sample_tokens} --lr 1e-6 --lr-decay-style constant
        --use-dynamic-batch-size --max-tokens-per-gpu {options.micro_tokens} --bf16 {options.flags}
    """
    return validate(parse(shlex.split(words))).settings


def lengths_of(options: argparse.Namespace) -> list[int]:
    """Return the tokens of each sample, an even number of them: as many as the micro-batches hold."""
    tokens, longest = options.micro_batches * options.micro_tokens, options.sample_tokens
    if not options.unequal:
        return [longest] * max(2, tokens // longest // 2 * 2)
    number = max(2, tokens * 16 // 9 // longest // 2 * 2)
    return np.linspace(max(longest // 8, 2), longest, number).astype(int).tolist()


def random_batch(settings: Settings, lengths: Sequence[int], vocabulary: int) -> TrainBatch:
    """Return samples of random tokens, each with its own prompt, so that none is computed once for several."""
    rng = np.random.default_rng(0)
    prompt_tokens = min(PROMPT_TOKENS, min(lengths) // 2)
    groups = []
    for number, both in enumerate(rng.permutation(lengths).reshape(-1, 2).tolist()):
        own = []
        for i, length in enumerate(both):
            prompt = Prompt("", tuple(rng.integers(4, vocabulary, prompt_tokens).tolist()))
            size = length - prompt_tokens
            tokens = rng.integers(4, vocabulary, size).tolist()
            own.append(Sample(prompt, number, 2 * number + i, tokens, "", [1] * size, [-11.9] * size, reward=float(i)))
        groups.append(PromptGroup(number, own[0].prompt, own))
    (batch,) = convert(groups, loss=settings.loss, global_batch_size=len(lengths))
    return batch


def operations(config: PretrainedConfig, batch: TrainBatch) -> float:
    """Count the floating-point operations of a step: two per multiply-add, the backward pass twice the forward."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    attention = config.hidden_size * width * (2 * heads + 2 * kv_heads)
    per_token = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    lengths, responses = batch.total_lengths, batch.response_lengths
    products = per_token * sum(lengths) + config.vocab_size * config.hidden_size * sum(responses)
    # A causal query sees half of the keys on average; scores and their product with the values.
    scores = config.num_hidden_layers * heads * width * sum(n * n for n in lengths)
    return 6.0 * products + 6.0 * scores


class Device:
    """The few calls that differ between a GPU and the CPU, on which only the script itself is tried."""

    def __init__(self, kind: str) -> None:
        self.is_gpu = kind == "cuda"
        self.torch = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.torch)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else "CPU"

    @property
    def peak(self) -> float | None:
        """Operations per second; None for a device that the table does not have."""
        figures = figures_of(self.name)
        return None if figures is None else figures.bf16

    @property
    def peak_memory_gib(self) -> float:
        return torch.cuda.max_memory_allocated() / 1024**3 if self.is_gpu else 0.0

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def timed(self, work: Callable[[], Any]) -> float:
        self.synchronize()
        started = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - started

    def idle_share(self, work: Callable[[], Any], table: Path) -> float | None:
        """Profile ``work`` and write the table. Return the share of its time without a running kernel; None on CPU."""
        kinds = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if self.is_gpu else [ProfilerActivity.CPU]
        with profile(activities=kinds) as profiled:
            seconds = self.timed(work)
        events = profiled.key_averages()
        sort = "self_cuda_time_total" if self.is_gpu else "self_cpu_time_total"
        table.write_text(events.table(sort_by=sort, row_limit=40, max_name_column_width=90))
        if not self.is_gpu:
            return None
        busy = sum(event.self_device_time_total for event in events if event.device_type.name == "CUDA") / 1e6
        return 1.0 - busy / seconds


def largest_allocation(work: Callable[[], Any]) -> int:
    """Return the bytes of the largest tensor that ``work`` makes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    events = profiled.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def foreseen_gib(settings: Settings) -> float | None:
    """Return the peak that ``--rehearse`` foresees, or None with a note of its reason on stderr."""
    with closing(ForeseenMemory(settings)) as foreseen:
        foreseen._process.wait()
        metrics = foreseen.compare({})
    return metrics[FORESEEN].value if metrics else None


def skip_if_too_large(foreseen: float | None, device: Device) -> None:
    """End the program, as ``run.sh`` reads it, if the GPU has less memory."""
    if device.is_gpu and foreseen is not None:
        has = torch.cuda.get_device_properties(device.torch).total_memory / 1024**3
        if foreseen > has - SPARE_GIB:
            print(f"skipped: --rehearse foresees {foreseen:.0f} GiB; this GPU has {has:.0f}")
            sys.exit(SKIPPED)


def fuse(backend: Any) -> None:
    """Have Megatron's MLPs use their fused SwiGLU. They read the field at each call."""
    from megatron.core.transformer.mlp import MLP  # not at the top: FSDP needs no Megatron

    changed = [
        part.config for chunk in backend.policy.stage.chunks for part in chunk.modules() if isinstance(part, MLP)
    ]
    assert changed, "the model has no MLP of Megatron's"
    for config in changed:
        config.bias_activation_fusion = True


def measure(options: argparse.Namespace, device: Device) -> dict[str, Any]:
    lengths = lengths_of(options)
    settings = settings_of(options, len(lengths))
    config = AutoConfig.from_pretrained(options.model)
    batch = random_batch(settings, lengths, config.vocab_size)
    foreseen = foreseen_gib(settings)
    skip_if_too_large(foreseen, device)
    (shard,) = schedule_step(batch, 1, settings.training, settings.parallel)
    backend = build_backend(settings, device.torch, total_steps=1000)
    if options.fused:
        fuse(backend)
    trainer = Trainer(backend, settings.loss, token_ranks=1)
    phases: list[dict[str, float]] = []

    def step() -> None:
        (metrics,) = trainer.train([shard])
        phases.append({name: metric.value for name, metric in metrics.items() if name.startswith("time/")})

    for _ in range(options.warm_up):
        step()
    if device.is_gpu:
        torch.cuda.reset_peak_memory_stats()
    phases.clear()
    times = [device.timed(step) for _ in range(options.steps)]
    seconds = statistics.median(times)
    done = operations(config, batch) / seconds
    report = {
        "backend": options.backend,
        "flags": options.flags,
        "device": device.name,
        "micro_batches": len(shard.micro_batches),
        "micro_tokens": options.micro_tokens,
        "sample_tokens": options.sample_tokens,
        "seconds": seconds,
        "spread": [min(times), max(times)],
        "phases": {name: statistics.median(p[name] for p in phases) for name in phases[0]},
        "tokens_per_second": sum(batch.total_lengths) / seconds,
        "tflops": done / 1e12,
        "mfu": None if device.peak is None else done / device.peak,
        "peak_memory_gib": device.peak_memory_gib,
        "foreseen_gib": foreseen,
        "logits_gib": 4 * config.vocab_size * options.micro_tokens / 1024**3,
    }
    report["largest_gib"] = largest_allocation(step) / 1024**3
    return report | {"idle_share": device.idle_share(step, options.result.with_suffix(".txt"))}


def main() -> None:
    options = options_given()
    device = Device(options.device)
    store = dist.FileStore(str(options.result.with_suffix(".store")), 1)
    dist.init_process_group("nccl" if device.is_gpu else "gloo", store=store, rank=0, world_size=1)
    options.result.write_text(json.dumps(measure(options, device)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
