"""Measure the additional memory that a rank needs to save and to resume a Megatron-Core checkpoint.

    python benchmarks/checkpoint_memory.py --megatron '--use-distributed-optimizer'
    python benchmarks/checkpoint_memory.py --megatron '--tensor-model-parallel-size 2'

A Llama with random weights trains for one step on the ranks of the layout; then each rank saves and loads. Prints for
each rank, in MiB: the size of the files it wrote, its resident memory before, and how far the kernel's high-water mark
(VmHWM, reset before) rose above that.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate

PROMPTS = Path(__file__).parents[1] / "examples" / "from_scripts" / "problems.jsonl"  # a file that exists; not read


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megatron", default="", help="more flags of train.py: the layout")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32000)
    return parser.parse_args()


def save_model(folder: str, options: argparse.Namespace) -> None:
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden_size,
        intermediate_size=3 * options.hidden_size,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    print(f"{model.num_parameters() / 1e6:.1f} million parameters, {options.ranks} ranks, {options.megatron}")
    model.save_pretrained(folder)


def settings_of(model: str, options: argparse.Namespace) -> Settings:
    words = f"""
        --device cpu --train-backend megatron --hf-checkpoint {shlex.quote(model)} --colocate --bf16
        --actor-num-gpus-per-node {options.ranks} --prompt-data {shlex.quote(str(PROMPTS))}
        --input-key prompt --label-key label --rm-type exact_match --num-rollout 2
        --rollout-batch-size 8 --n-samples-per-prompt 8 --rollout-max-response-len 16
        --lr 1e-6 --save checkpoints {options.megatron}
    """
    return validate(parse(shlex.split(words))).settings


def resident(mark: str) -> float:
    """Return the resident memory in MiB: now (``VmRSS``), or the highest since the last reset (``VmHWM``)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(mark):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {mark}; run this on Linux")


def rise(work: Callable[[], object]) -> tuple[float, float]:
    """Run ``work``; return the resident MiB before it, and how far its peak rose above that."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return before, resident("VmHWM") - before


def measure(rank: int, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    from miles.training.megatron.cpu_support import support_cpu

    support_cpu()
    from miles.training.megatron.backend import MegatronBackend

    backend = MegatronBackend(settings_of(str(folder), options), torch.device("cpu"), total_steps=2)
    (distributed,) = backend.policy.distributed
    for buffer in (*distributed.buffers, *distributed.expert_parallel_buffers):
        buffer.grad_data.normal_()
    backend.policy.optimizer.step()
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    before, saving = rise(lambda: backend.save(checkpoint, {}))
    _, loading = rise(lambda: backend.load(checkpoint))
    written = sum(file.stat().st_size for file in checkpoint.glob(f"__{rank}_*")) / 1024**2
    for number in range(options.ranks):
        if number == rank:
            print(f"rank {rank}: wrote {written:.0f}, had {before:.0f}, saving +{saving:.0f}, loading +{loading:.0f}")
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = options_given()
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder, options)
        spawn = multiprocessing.get_context("spawn")
        ranks = [spawn.Process(target=measure, args=(rank, Path(folder), options)) for rank in range(options.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
