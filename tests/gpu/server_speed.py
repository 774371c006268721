"""Measure one SGLang server of a model: ``python server_speed.py MODEL RESULT.json``. DEVICE is ``cuda`` or ``cpu``.

Writes one JSON object, also if it fails, with what was measured until then:

- ``tokens_per_second`` by the number of responses at once, with CUDA graphs and ``without_graphs``;
- ``updates``: bytes and seconds of weight updates from the host's memory by each way, and from another GPU over NCCL;
- ``memory``: bytes of the GPU that are taken while the server serves, after it has released them, and taken back.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import AutoModelForCausalLM

from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.engine.base import Engine, GenerationRequest, LocalHost, SamplingParams, start_engine
from miles.engine.servers.states import Servers
from miles.engine.servers.weight_updates import WeightUpdates
from miles.engine.weight_sync.sender import WeightSender
from miles.models.reading import read_config
from miles.training.fsdp.adapter import merged_weights
from miles.training.fsdp.checkpoint import as_on_disk
from miles.types.weights import WeightChunk, in_chunks
from tests.gpu.engine_checks import prompts
from tests.gpu.sglang_engine import ENGINE, RUN

SIZES = "--sglang-max-total-tokens 32768 --sglang-max-running-requests 64 --sglang-disable-radix-cache"
ON_GPU = "--bf16 --no-offload-train --sglang-mem-fraction-static 0.5"
ON_GPU += " --sglang-cuda-graph-max-bs-decode 64 --sglang-cuda-graph-backend-prefill disabled"
WITHOUT_GRAPHS = "--sglang-cuda-graph-backend-decode disabled"
SAVER = "torch_memory_saver"
AT_ONCE = (1, 8, 64)  # responses: the fewer, the more of a step is the launch of its kernels
PROMPT_TOKENS = 64
MODES = ("ipc", "disk", "broadcast")
REPEATS = 3


def settings_of(model: Path, output: Path, device: str, more: str = "") -> Settings:
    """Return the settings of a run with this engine. It can release its memory if the package for that is installed."""
    on_gpu = f"{ON_GPU} {'--offload-rollout' if find_spec(SAVER) else '--no-offload-rollout'}"
    words = f"{RUN} {ENGINE} {SIZES} {more} {on_gpu if device == 'cuda' else '--fp32'}".split()
    words += ["--device", device, "--hf-checkpoint", str(model), "--output-dir", str(output)]
    return validate(parse(words)).settings


async def rate(engine: Engine, vocab_size: int, at_once: int, new_tokens: int) -> float:
    """Return the tokens per second of ``at_once`` responses to prompts of their own, after as many to warm up."""
    asked = prompts(vocab_size, [PROMPT_TOKENS] * at_once)
    for _ in range(2):
        began = time.perf_counter()
        requests = [GenerationRequest(prompt, (0,), SamplingParams(new_tokens)) for prompt in asked]
        groups = await asyncio.gather(*map(engine.generate, requests))
        seconds = time.perf_counter() - began
    return sum(len(response.token_ids) for group in groups for response in group) / seconds


async def rates(engine: Engine, vocab_size: int, new_tokens: int) -> dict[str, float]:
    return {str(number): await rate(engine, vocab_size, number, new_tokens) for number in AT_ONCE}


def chunks_of(model: Path, device: str = "cpu") -> list[WeightChunk]:
    """Return all weights in bf16, as an FSDP trainer sends them."""
    made = AutoModelForCausalLM.from_pretrained(model, config=read_config(str(model)), dtype=torch.bfloat16)
    made = made.to(device).requires_grad_(False)
    return list(in_chunks(as_on_disk(made, merged_weights(made, torch.bfloat16))))


async def updates_by(
    mode: str, engine: Any, settings: Settings, chunks: Sequence[WeightChunk], source: torch.device | None = None
) -> dict[str, Any]:
    """Send the weights several times. The first update, which forms a group for a broadcast, is not counted."""
    sglang = replace(settings.sglang, update_weight_transfer_mode=mode)
    servers: Servers = engine.servers
    updates = WeightUpdates(servers, sglang, WeightSender(sglang, settings.weights_folder, source), engine.receiver)
    seconds = []
    for _ in range(1 + REPEATS):
        began = time.perf_counter()
        await updates.update(chunks, (servers.version or 0) + 1)
        seconds.append(time.perf_counter() - began)
    return {
        "mode": mode,
        "over": "NCCL" if source is not None else "gloo" if mode == "broadcast" else "the host",
        "bytes": sum(tensor.nbytes for chunk in chunks for tensor in chunk.tensors.values()),
        "seconds": statistics.median(seconds[1:]),
        "first": seconds[0],
    }


def taken() -> int:
    """Return the bytes of the GPU that all processes hold."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


async def released(engine: Any, chunks: Sequence[WeightChunk], version: int, device: str) -> dict[str, Any]:
    """Have the server release its memory, then take it back; return its memory meanwhile, or why it cannot."""
    if device != "cuda":
        return {"not measured": "there is no GPU"}
    if find_spec(SAVER) is None:
        return {"not measured": f"{SAVER} is not installed"}
    memory = {"serving": taken()}
    await engine.release_memory()
    memory["released"] = taken()
    await engine.update_weights(chunks, version)
    return memory | {"taken back": taken()}


async def measure(model: Path, output: Path, device: str, new_tokens: int, report: dict[str, Any]) -> None:
    """Start a server and add its measurements to ``report``, then another one without graphs."""
    vocab_size = read_config(str(model)).get_text_config().vocab_size
    settings = settings_of(model, output / "graphs", device)
    engine: Any = await start_engine(settings, LocalHost(device))
    try:
        report["tokens_per_second"] = await rates(engine, vocab_size, new_tokens)
        chunks = chunks_of(model)
        for mode in MODES:
            report["updates"].append(await updates_by(mode, engine, settings, chunks))
        if torch.cuda.device_count() > 1:
            own = [WeightChunk({n: t.to("cuda:1") for n, t in chunk.tensors.items()}) for chunk in chunks]
            over_nccl = await updates_by("broadcast", engine, settings, own, torch.device("cuda:1"))
            report["updates"].append(over_nccl)
        else:
            report["no NCCL"] = f"needs 2 GPUs; this machine has {torch.cuda.device_count()}"
        report["memory"] = await released(engine, chunks, engine.servers.version + 1, device)
    finally:
        await engine.close()
    engine = await start_engine(settings_of(model, output / "eager", device, WITHOUT_GRAPHS), LocalHost(device))
    try:
        report["without_graphs"] = await rates(engine, vocab_size, new_tokens)
    finally:
        await engine.close()


def main(model: Path, result: Path, device: str) -> None:
    report: dict[str, Any] = {"device": torch.cuda.get_device_name() if device == "cuda" else "CPU", "updates": []}
    try:
        asyncio.run(measure(model, result.with_suffix(""), device, 128 if device == "cuda" else 8, report))
    finally:
        result.write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), os.environ.get("DEVICE", "cuda"))
