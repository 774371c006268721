"""Responses that continue after an interruption, on the real engine."""

import asyncio

import pytest
import torch
from tolerance import log_prob_error
from transformers import AutoModelForCausalLM

from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.embedded.torch_engine import TorchEngine
from miles.rollout.interruptible_engine import InterruptibleEngine
from miles.types.weights import WeightChunk

PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]
SEEDS = (0, 1)


async def interrupted(tiny_model, sampling, at):
    """All responses, interrupted whenever the longest running one reaches a length in ``at``."""
    inner = TorchEngine(tiny_model, torch.float32, "cpu", max_batch_size=4)
    inner._runner.eos_ids = frozenset()
    engine = InterruptibleEngine(inner)
    weights = dict(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).named_parameters())
    requests = [GenerationRequest(prompt, SEEDS, sampling) for prompt in PROMPTS]
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    for version, length in enumerate(at, start=1):
        while not any(len(s.token_ids) >= length for s in inner._batch.sequences):
            await asyncio.sleep(0)
        await engine.interrupt()
        assert not inner._batch.sequences
        late = asyncio.create_task(engine.generate(requests[0]))
        await asyncio.sleep(0)
        assert not inner._waiting and not late.done()
        late.cancel()
        await engine.update_weights([WeightChunk(weights)], version)
        engine.continue_generation()
    return [answer for task in running for answer in await task]


@pytest.mark.parametrize("at", [(3,), (2, 4, 1)])
async def test_interrupted_responses_are_whole_and_scored_right(tiny_model, at):
    answers = await interrupted(tiny_model, SamplingParams(12, temperature=0.7), at)
    reference = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    assert {len(set(answer.token_versions)) for answer in answers} != {1}
    for prompt, answer in zip([p for p in PROMPTS for _ in SEEDS], answers, strict=True):
        assert (answer.finish_reason, len(answer.token_ids)) == ("length", 12)
        assert answer.token_versions == sorted(answer.token_versions)
        ids = torch.tensor([[*prompt, *answer.token_ids]])
        with torch.no_grad():
            logits = reference(ids).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / 0.7, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        tolerance = log_prob_error(reference, ids, 0.7)
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, atol=tolerance, rtol=0)


async def test_greedy_responses_are_those_of_an_undisturbed_engine(tiny_model):
    sampling = SamplingParams(12, temperature=0)
    disturbed = await interrupted(tiny_model, sampling, (2, 5))
    straight = await interrupted(tiny_model, sampling, ())
    assert [a.token_ids for a in disturbed] == [a.token_ids for a in straight]
