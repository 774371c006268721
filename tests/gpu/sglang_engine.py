"""Check one SGLang server: ``python sglang_engine.py KIND FOLDER``.

With a family's kind the server generates, is sent other weights and generates again (``engine_checks.py``), with
``deterministic`` the dense family's does so under ``--deterministic-mode``; with ``stop`` a text ends a response.
Prints one JSON object. DEVICE is the server's, by default ``cuda``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from miles.config.parser import parse
from miles.config.settings import Settings
from miles.config.validate import validate
from miles.engine.base import LocalHost, start_engine
from tests.gpu.engine_checks import assert_follows, assert_stops, follow_an_update, stop_at_a_text, write_two
from tests.gpu.tiny_families import DENSE, write_readable

# A task that is never asked for: only the engine of the run is started.
RUN = "--prompt-data reasoning_gym:products --rm-type last_number --num-rollout 1 --rollout-batch-size 1"
RUN += " --n-samples-per-prompt 2 --rollout-max-response-len 16 --train-backend fsdp --actor-num-gpus-per-node 1"
# Weights that are read from shared memory: NCCL would need a second GPU.
ENGINE = "--rollout-engine sglang --colocate --update-weight-transfer-mode ipc"
# The cache is small, so several servers can share the GPU. It keeps no prefixes of earlier requests, so equal requests
# are computed alike.
SMALL = "--sglang-max-total-tokens 8192 --sglang-max-running-requests 16 --sglang-disable-radix-cache"
ON_GPU = "--bf16 --no-offload-train --no-offload-rollout --sglang-mem-fraction-static 0.5"
ON_GPU += " --sglang-cuda-graph-max-bs-decode 16 --sglang-cuda-graph-backend-prefill disabled"
BY_KIND = {kind: "--sglang-max-mamba-cache-size 96" for kind in ("qwen3_5_moe_text", "qwen3_next", "nemotron_h")}
DETERMINISTIC = "deterministic"  # the dense family again
BY_KIND[DETERMINISTIC] = "--deterministic-mode"
STOPS = "--rollout-stop", "never written"  # the server has a tokenizer; the texts themselves are the requests'


def words_of(kind: str, model: Path, output: Path, device: str) -> list[str]:
    """Return the command line of a run whose engine is the one to check."""
    words = f"{RUN} {ENGINE} {SMALL} {BY_KIND.get(kind, '')} {ON_GPU if device == 'cuda' else '--fp32'}".split()
    words += ["--device", device, "--hf-checkpoint", str(model), "--output-dir", str(output)]
    return [*words, *(STOPS if kind == "stop" else ())]


def settings_of(kind: str, model: Path, output: Path, device: str) -> Settings:
    return validate(parse(words_of(kind, model, output, device))).settings


async def check_family(kind: str, folder: Path, device: str) -> dict[str, float]:
    first, other = write_two(DENSE if kind == DETERMINISTIC else kind, folder)
    engine = await start_engine(settings_of(kind, first, folder / "run", device), LocalHost(device))
    try:
        return await follow_an_update(engine, first, other)
    finally:
        await engine.close()


async def check_stop(folder: Path, device: str) -> dict[str, Any]:
    decode = write_readable(folder / "model")
    engine = await start_engine(settings_of("stop", folder / "model", folder / "run", device), LocalHost(device))
    try:
        result = await stop_at_a_text(engine, decode)
    finally:
        await engine.close()
    assert_stops(result, decode)
    return result


def main(kind: str, folder: Path, device: str) -> None:
    result: dict[str, Any] = asyncio.run(
        check_stop(folder, device) if kind == "stop" else check_family(kind, folder, device)
    )
    print(json.dumps(result), flush=True)
    if kind != "stop":
        assert_follows(result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), os.environ.get("DEVICE", "cuda"))
