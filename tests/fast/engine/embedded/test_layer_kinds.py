"""The embedded engine equals transformers on windows, sinks, recurrent layers and attention that chooses keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_kinds import WINDOWS, config_of
from tolerance import KIND_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM

from miles.engine.base import Generation, GenerationRequest, SamplingParams, WeightChunk
from miles.engine.embedded import attention
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.packing import PACKABLE, RECURRENT

# Prompts of one length and of several; responses that end at different times, so rows move.
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37)), (5, 6, 8), (1, 2)]
NEW_TOKENS = (9, 14, 7, 12, 3)
ROWS = 6  # fewer than sequences, so some wait


def save_model(kind: str, folder: Path, seed: int = 3) -> str:
    config = config_of(kind, initializer_range=0.2, **WINDOWS.get(kind, {}))
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def requests() -> list[GenerationRequest]:
    return [GenerationRequest(p, (1, 2, 3), SamplingParams(n)) for p, n in zip(PROMPTS, NEW_TOKENS, strict=True)]


async def generate(engine: TorchEngine) -> list[list[Generation]]:
    return await asyncio.gather(*(engine.generate(request) for request in requests()))


def largest_difference(path: str, groups: list[list[Generation]]) -> float:
    """Of any log-prob, from one forward pass of transformers over each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    largest = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group:
            ids = torch.tensor([*prompt, *response.token_ids])
            with torch.no_grad():
                log_p = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            wanted = log_p[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
            largest = max(largest, (wanted - torch.tensor(response.log_probs)).abs().max().item())
    return largest


@pytest.mark.parametrize("kind", PACKABLE + RECURRENT)
async def test_log_probs_are_those_of_transformers(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "MASKED_QUERIES", 8)
    path = save_model(kind, tmp_path)
    generations = await generate(TorchEngine(path, torch.float32, "cpu", ROWS))
    assert largest_difference(path, generations) < KIND_LOG_PROB_ERROR


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "glm_moe_dsa"])
async def test_an_update_of_the_weights_leaves_nothing_of_the_old_ones(kind, tmp_path):
    first, other = (save_model(kind, tmp_path / str(seed), seed) for seed in (3, 4))
    engine = TorchEngine(first, torch.float32, "cpu", ROWS)
    before = await generate(engine)
    await engine.update_weights([WeightChunk(load_file(Path(other) / "model.safetensors"))], 1)
    after = await generate(engine)
    assert after[0][0].token_ids != before[0][0].token_ids
    assert largest_difference(other, after) < KIND_LOG_PROB_ERROR
