"""Answers of the embedded engine, and how far their log-probs are from those of transformers."""

from __future__ import annotations

import asyncio

import torch
from transformers import AutoModelForCausalLM

from miles.engine.base import Generation, GenerationRequest, SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine
from miles.models.reading import choose_experts

# Prompts of one length and of several; answers end at different times, so that sequences share rows and move.
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37)), (5, 6, 8), (1, 2)]
NEW_TOKENS = (9, 14, 7, 12, 3)
ROWS = 6  # fewer than sequences, so some wait


async def answers(engine: TorchEngine) -> list[list[Generation]]:
    """Return three answers to each prompt."""
    requests = [GenerationRequest(p, (1, 2, 3), SamplingParams(n)) for p, n in zip(PROMPTS, NEW_TOKENS, strict=True)]
    return await asyncio.gather(*map(engine.generate, requests))


def largest_difference(path: str, groups: list[list[Generation]]) -> float:
    """Return that of any log-prob from one forward pass of transformers over each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    choose_experts(model)
    largest = 0.0
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for response in group:
            ids = torch.tensor([*prompt, *response.token_ids])
            with torch.no_grad():
                log_p = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
            expected = log_p[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0]
            largest = max(largest, (expected - torch.tensor(response.log_probs)).abs().max().item())
    return largest
