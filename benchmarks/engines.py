"""Measure the engines on this machine: ``python benchmarks/engines.py MODEL [ENGINE ...]`` prints a JSON line for each.

Per engine: seconds until it serves, tokens per second with 1, 16 and 64 responses of 64 tokens at once, seconds of a
weight update, and the memory of its processes. They run one after the other, in bf16 where the CPU multiplies it and
otherwise in fp32; a busy machine slows all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from miles.base.host import has_bf16
from miles.config.parser import parse
from miles.config.validate import validate
from miles.engine.base import Engine, GenerationRequest, LocalHost, SamplingParams, start_engine
from miles.types.weights import in_chunks

TOKENS = 64
RUN = (
    "--prompt-data reasoning_gym:products --rm-type last_number --num-rollout 1 --rollout-batch-size 8 "
    f"--debug-rollout-only {'--bf16' if has_bf16() else ''}"
)


def memory_mb() -> int:
    """Return the private memory of this process and those that it started, in MB."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(process.memory_full_info().uss for process in tree) // 1_000_000


async def speed(engine: Engine, number: int) -> float:
    """Return the tokens per second of ``number`` responses at once, each to its own prompt."""
    sampling = SamplingParams(TOKENS)
    requests = [GenerationRequest(tuple(range(5 + n, 53 + n)), (n,), sampling) for n in range(number)]
    began = time.perf_counter()
    answers = await asyncio.gather(*map(engine.generate, requests))
    return sum(len(answer.token_ids) for (answer,) in answers) / (time.perf_counter() - began)


async def measure(model: str, name: str) -> dict[str, Any]:
    """Return the measurements of one engine."""
    flags = f"{RUN} --rollout-max-response-len {TOKENS} --rollout-engine {name} --output-dir {mkdtemp()} --device cpu"
    settings = validate(parse(["--hf-checkpoint", model, *flags.split()])).settings
    began = time.perf_counter()
    engine = await start_engine(settings, LocalHost("cpu"))
    figures: dict[str, Any] = {"engine": name, "start_seconds": round(time.perf_counter() - began, 1)}
    try:
        await speed(engine, 2)  # the first requests compile
        for number in (1, 16, 64):
            figures[f"tokens_per_second_{number}"] = round(await speed(engine, number))
        figures["memory_mb"] = memory_mb()
        dtype = torch.bfloat16 if settings.training.bf16 else torch.float32
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).state_dict()
        weights.pop("lm_head.weight", None)  # tied
        chunks = list(in_chunks(weights.items()))
        began = time.perf_counter()
        await engine.update_weights(chunks, 1)
        figures["update_seconds"] = round(time.perf_counter() - began, 2)
    finally:
        await engine.close()
    return figures


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("model", type=Path, help="Hugging Face folder")
    given.add_argument("engines", nargs="*", default=["torch", "sglang", "vllm"])
    words = given.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    for engine_name in words.engines:
        print(json.dumps(asyncio.run(measure(str(words.model), engine_name))), flush=True, file=sys.stdout)
