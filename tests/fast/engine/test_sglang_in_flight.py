"""Abort and weight updates on the real server with requests in flight."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR

from miles.engine.base import GenerationRequest, SamplingParams
from miles.engine.servers.keys import bearer
from tests.fast.engine.conftest import chunks_of
from tests.fast.engine.sglang_servers import KEYS, log_probs_of, log_probs_with_old_cache

pytestmark = pytest.mark.timeout(900)

PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37)), (5, 6, 8)]
TOKENS = 100  # greedy responses to these prompts are no shorter
SAMPLING = SamplingParams(max_new_tokens=TOKENS, temperature=0.0)
BOTH = pytest.mark.parametrize("mode", ["retract", "in_place"])


@asynccontextmanager
async def in_flight(engine, address):
    """Send all prompts and wait until they generate. A token takes 0.2 s, until the block calls the yielded function.

    So the requests are in flight for 20 s, however slowly the machine runs the block.
    """
    async with httpx.AsyncClient(base_url=f"http://{address}") as http:

        async def pause_between_tokens(seconds=0.0):
            await http.post("/slow_down", json={"forward_sleep_time": seconds}, headers=bearer(KEYS.admin))

        await pause_between_tokens(0.2)
        asked = [asyncio.create_task(engine.generate(GenerationRequest(p, (0,), SAMPLING))) for p in PROMPTS]
        try:
            while await running_requests(http) < len(PROMPTS):
                assert not any(task.done() for task in asked), "a request ended before all of them ran"
                await asyncio.sleep(0.005)
            yield asked, pause_between_tokens
        finally:
            await pause_between_tokens()


async def running_requests(http):
    load = (await http.get("/v1/loads", headers=bearer(KEYS.server))).json()["loads"][0]
    return load.get("num_running_reqs", 0)


async def generated(asked):
    return [(await task)[0] for task in asked]


def recomputed(old, new, prompt, tokens, switch):
    """Return log-probs if the new model generates from ``switch`` on, after reading all previous tokens itself."""
    return torch.cat([log_probs_of(old, prompt, tokens)[:switch], log_probs_of(new, prompt, tokens)[switch:]])


@BOTH
def test_weights_change_under_requests_in_flight(running, mode):
    """Each token has the version and the log-prob of the weights that generated it."""

    async def scenario(engine, version):
        async with in_flight(engine, running.address) as (asked, hurry):
            await engine.update_weights(chunks_of(running.other), version)
            await hurry()
            return await generated(asked)

    expected = recomputed if mode == "retract" else log_probs_with_old_cache
    with running.engine(pause_generation_mode=mode) as engine:
        before, version = engine.servers.version, next(running.versions)
        answers = running.run(scenario(engine, version))
        assert any(answer.earlier_versions for answer in answers), "no request was in flight"
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert answer.finish_reason in ("length", "stop")
            switch = answer.token_versions.count(before)
            assert answer.token_versions == [before] * switch + [version] * (len(answer.token_ids) - switch)
            wanted = expected(running.model, running.other, prompt, answer.token_ids, switch)
            assert torch.tensor(answer.log_probs).double() == pytest.approx(wanted, abs=SERVER_LOG_PROB_ERROR)
        # Later requests reuse no prefix computed by the old weights.
        for prompt, answer in zip(PROMPTS, running.generate(engine, PROMPTS, max_new_tokens=4), strict=True):
            wanted = log_probs_of(running.other, prompt, answer.token_ids)
            assert torch.tensor(answer.log_probs).double() == pytest.approx(wanted, abs=SERVER_LOG_PROB_ERROR)


def test_aborted_requests_return_their_tokens_so_far(running):
    async def scenario(engine):
        async with in_flight(engine, running.address) as (asked, hurry):
            with pytest.raises(RuntimeError, match="requests are in flight: engines release their memory when idle"):
                await engine.release_memory()
            await engine.abort()
            await hurry()
            return await generated(asked)

    with running.engine() as engine:
        answers = running.run(scenario(engine))
        assert {answer.finish_reason for answer in answers} <= {"abort", "stop"}
        assert "abort" in {answer.finish_reason for answer in answers}
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            assert len(answer.token_ids) < TOKENS
            assert answer.token_versions == [engine.servers.version] * len(answer.token_ids)
            wanted = log_probs_of(running.model, prompt, answer.token_ids)
            assert torch.tensor(answer.log_probs).double() == pytest.approx(wanted, abs=SERVER_LOG_PROB_ERROR)
        assert any(answer.token_ids for answer in answers)
        assert len(running.generate(engine, PROMPTS, max_new_tokens=4)) == len(PROMPTS)
