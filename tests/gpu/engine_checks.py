"""Compare an engine with transformers: log-probs before and after an update, and the end of a response at a text.

The engine may be any: tests/fast calls these functions with the torch engine on CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto import AutoModelForCausalLM

from miles.engine.base import Engine, Generation, GenerationRequest, SamplingParams
from miles.models.reading import read_config
from tests.gpu.tiny_families import sent_weights, write_family

# Shorter and longer than a page of the cache (64 tokens), a window (128) and a chunk of a recurrent layer (64 or 128).
PROMPT_LENGTHS = (1, 9, 70, 200)
NEW_TOKENS, SAMPLES = 16, 4

# Distance of log-probs in bf16 from log-probs of the same weights in fp32: 0.01 to 0.04 for transformers in bf16 on
# CPU. One tensor that keeps its old values makes it larger than the bound, apart from a few small ones. It is a median,
# because a router in bf16 now and then chooses another expert, which moves a token's log-prob by up to 1.
BOUND = 0.1
# Log-probs of other weights are so far away at least, or the comparison states nothing.
APART = 6 * BOUND

STOP_TOKENS = slice(3, 7)  # of a free response: the text that ends the other one


def prompts(vocab_size: int, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(4, vocab_size, (n,), generator=generator).tolist()) for n in lengths]


async def generate(engine: Engine, vocab_size: int, lengths: Sequence[int]) -> list[tuple[tuple[int, ...], Generation]]:
    """Return responses, each with its prompt."""
    sampling, seeds = SamplingParams(NEW_TOKENS), tuple(range(SAMPLES))
    asked = [GenerationRequest(prompt, seeds, sampling) for prompt in prompts(vocab_size, lengths)]
    groups = await asyncio.gather(*(engine.generate(request) for request in asked))
    return [(request.prompt_ids, answer) for request, group in zip(asked, groups, strict=True) for answer in group]


def oracle(folder: Path) -> PreTrainedModel:
    """Return the model of ``folder`` in fp32, by transformers on CPU."""
    config = read_config(str(folder))
    options: dict[str, Any] = dict(config=config, dtype=torch.float32, attn_implementation="eager")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.eval().requires_grad_(False)


def distance(model: PreTrainedModel, responses: Sequence[tuple[tuple[int, ...], Generation]]) -> float:
    """Return the distance of the responses' log-probs from the model's: the largest median of a prompt's tokens."""
    of_prompts: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for prompt, response in responses:
        ids = torch.tensor([[*prompt, *response.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        of_prompts.setdefault(prompt, []).append((torch.tensor(response.log_probs) - wanted).abs())
    return max(torch.cat(distances).median().item() for distances in of_prompts.values())


async def follow_an_update(
    engine: Engine, first: Path, other: Path, lengths: Sequence[int] = PROMPT_LENGTHS
) -> dict[str, float]:
    """Generate with the weights of ``first``, then with ``other``'s, sent as a trainer sends them.

    Returns the distances ``before`` and ``after``, and those from the model that the engine does not have then. A test
    passes them to ``assert_follows``.
    """
    models = {"first": oracle(first), "other": oracle(other)}
    vocab_size = read_config(str(first)).get_text_config().vocab_size
    before = await generate(engine, vocab_size, lengths)
    await engine.update_weights(list(sent_weights(_in_bf16(other))), 1)
    after = await generate(engine, vocab_size, lengths)
    assert {response.weight_version for _, response in after} == {1}
    return {
        "before": distance(models["first"], before),
        "after": distance(models["other"], after),
        "before, other weights": distance(models["other"], before),
        "after, first weights": distance(models["first"], after),
    }


def _in_bf16(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, config=read_config(str(folder)), dtype=torch.bfloat16
    )
    return model.requires_grad_(False)


def write_two(kind: str, folder: Path) -> tuple[Path, Path]:
    """Write two models of a family, and return their folders."""
    first, other = folder / "first", folder / "other"
    write_family(kind, first, seed=1)
    write_family(kind, other, seed=2)
    return first, other


def assert_follows(errors: dict[str, float]) -> None:
    """Fail if the engine computes other log-probs than the weights that it should have."""
    for name in ("before", "after"):
        assert errors[name] < BOUND, f"{name} the update: {errors}"
    for name in ("before, other weights", "after, first weights"):
        assert errors[name] > APART, f"{name}: too near to tell apart: {errors}"


async def stop_at_a_text(engine: Engine, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    """Take a text of four tokens from a free greedy response, and let it end another one.

    Returns both responses as ``free`` and ``ended`` with tokens, log-probs and reason, and the ``text``.
    """
    prompt = prompts(vocab_size=100)[1]
    (free,) = await engine.generate(_greedy(prompt))
    text = decode(free.token_ids[STOP_TOKENS])
    (ended,) = await engine.generate(_greedy(prompt, "never written", text))
    return {
        "text": text,
        **{
            name: {"tokens": made.token_ids, "log_probs": made.log_probs, "reason": made.finish_reason}
            for name, made in (("free", free), ("ended", ended))
        },
    }


def _greedy(prompt: tuple[int, ...], *stop_texts: str) -> GenerationRequest:
    return GenerationRequest(prompt, (1,), SamplingParams(24, temperature=0.0, stop_texts=stop_texts))


def assert_stops(result: dict[str, Any], decode: Callable[[list[int]], str]) -> None:
    """Fail if the response did not end with the token that completes the text, or lost a log-prob."""
    ended, text = result["ended"], result["text"]
    assert text and ended["reason"] == "stop", result
    assert text in decode(ended["tokens"]), result
    assert text not in decode(ended["tokens"][:-1]), result
    assert len(ended["log_probs"]) == len(ended["tokens"]), result
    assert result["free"]["tokens"][: len(ended["tokens"])] == ended["tokens"], result
