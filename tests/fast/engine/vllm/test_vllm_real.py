"""Responses of real vLLM servers, weight updates to them, and servers that are killed or stopped.

Run with --all; skipped where the environment that scripts/vllm.sh makes is missing.
"""

import asyncio
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tolerance import SERVER_LOG_PROB_ERROR
from transformers import AutoModelForCausalLM, LlamaConfig

from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import ServerFlags
from miles.config.vllm.environment import missing_vllm, vllm_python
from miles.engine.base import GenerationRequest, LocalServer, SamplingParams
from miles.engine.servers.keys import keys_of
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.leftovers import open_segments
from miles.engine.servers.processes import LogFile
from miles.engine.vllm.client import VllmClient
from miles.engine.vllm.engine import VllmEngine
from miles.engine.vllm.launch import VllmProgram
from miles.engine.weight_sync.sender import WeightSender
from miles.types.weights import in_chunks
from tests.fast.conftest import VLLM_SHAPE, byte_tokenizer, save_tiny_model
from tests.fast.engine.sglang_servers import log_probs_of, log_probs_with_old_cache, other_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(missing_vllm(vllm_python()) is not None, reason="vLLM is missing: bash scripts/vllm.sh"),
]
KEYS = keys_of(ServerFlags(), external=False)
PROMPTS = [(5, 6, 7), (9,), tuple(range(20, 37))]
CHI_SQUARE_999 = 37.7  # of 15 degrees of freedom: one right engine in a thousand exceeds it


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny Llama whose heads are as large as vLLM's attention on CPU takes them."""
    path = tmp_path_factory.mktemp("tiny-llama")
    save_tiny_model(path, **VLLM_SHAPE, max_position_embeddings=2048)
    return path


@asynccontextmanager
async def started(model, logs, number=1, **flags):
    program = VllmProgram(
        str(model),
        "float32",
        "cpu",
        1,
        7,
        KEYS,
        flags=("--max-model-len", "512"),
        reads_text=True,
        python=vllm_python(),
    )
    hosts = [ServerOnHost(program, LogFile(logs / f"{n}.log"), "127.0.0.1") for n in range(number)]
    sglang = SglangArguments(**{"update_weight_transfer_mode": "disk", **flags})
    size = LlamaConfig.from_pretrained(model).vocab_size
    servers = [LocalServer(n, host) for n, host in enumerate(hosts)]
    engine = VllmEngine(servers, sglang, size, WeightSender(sglang, logs / "weights"), None, keys=KEYS)
    try:
        await engine.start()
        yield engine, hosts
    finally:
        await engine.close()


async def generate(engine, prompts=PROMPTS, seeds=4, **sampling):
    requests = [
        GenerationRequest(p, tuple(range(seeds)), SamplingParams(**{"max_new_tokens": 12, **sampling})) for p in prompts
    ]
    return [answer for answers in await asyncio.gather(*map(engine.generate, requests)) for answer in answers]


def assert_log_probs(generation, expected):
    assert torch.tensor(generation.log_probs).double() == pytest.approx(expected, abs=SERVER_LOG_PROB_ERROR)


def assert_of(model, answers, prompts=PROMPTS, seeds=4, temperature=1.0):
    for prompt, answer in zip([p for p in prompts for _ in range(seeds)], answers, strict=True):
        assert_log_probs(answer, log_probs_of(model, prompt, answer.token_ids, temperature))


async def test_answers_are_the_models_before_and_after_an_update(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    async with started(folder, tmp_path) as (engine, _):
        for temperature in (1.0, 0.7):
            assert_of(model, await generate(engine, temperature=temperature), temperature=temperature)
        await assert_support(engine, model)
        await assert_frequencies(engine, model)
        await assert_stops(engine)
        await assert_teaches(engine, model)
        many = [tuple(range(5 + n, 65 + n)) for n in range(64)]  # more tokens than vLLM prefills in one step
        assert_of(model, await generate(engine, many, 1), many, 1)
        first, again = [await generate(engine) for _ in range(2)]
        assert [a.token_ids for a in first] == [a.token_ids for a in again], "a seed repeats a response"
        assert len({tuple(a.token_ids) for a in first[:4]}) == 4, "other seeds give others"
        with pytest.raises(ValueError, match="HTTP 400"):
            await generate(engine, [(5,) * 600], 1)

        other = other_weights(model)
        running = asyncio.ensure_future(generate(engine, [PROMPTS[0]], 2, max_new_tokens=480))
        await asyncio.sleep(0.2)
        await engine.update_weights(list(in_chunks(other.named_parameters(), bucket_bytes=20_000)), 5)
        updated = await generate(engine, max_new_tokens=16)
        assert_of(other, updated)
        assert all(answer.token_versions == [5] * len(answer.token_ids) for answer in updated)
        for answer in await running:  # what was generated after the update is of the new weights alone
            split = answer.token_versions.count(0)
            ids, new = answer.token_ids, torch.tensor(answer.log_probs[split:]).double()
            assert new == pytest.approx(log_probs_of(other, PROMPTS[0] + tuple(ids[:split]), ids[split:]), abs=1e-3)
    other.save_pretrained(tmp_path / "other")
    byte_tokenizer().save_pretrained(tmp_path / "other")
    async with started(tmp_path / "other", tmp_path) as (fresh, _):
        expected = await generate(fresh, max_new_tokens=16)
    assert [a.token_ids for a in updated] == [a.token_ids for a in expected]


async def test_in_place_requests_keep_their_keys_and_values_and_later_ones_do_not_find_them(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    other = other_weights(model)
    async with started(folder, tmp_path, pause_generation_mode="in_place") as (engine, _):
        running = asyncio.ensure_future(generate(engine, [PROMPTS[0]], 2, max_new_tokens=480))
        await generate(engine, [PROMPTS[1]], 1, max_new_tokens=8)  # once it has ended, those before it generate
        await engine.update_weights(list(in_chunks(other.named_parameters(), bucket_bytes=20_000)), 5)
        for answer in await running:
            switch = answer.token_versions.count(0)
            assert 0 < switch < len(answer.token_ids)
            assert_log_probs(answer, log_probs_with_old_cache(model, other, PROMPTS[0], answer.token_ids, switch))
        assert_of(other, await generate(engine))


async def assert_support(engine, model):
    sampling = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "returns_support": True}
    answers = await generate(engine, **sampling)
    for prompt, answer in zip([p for p in PROMPTS for _ in range(4)], answers, strict=True):
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1].double() / 0.7
        expected = []
        for row, token_set, token in zip(logits, answer.support.sets(), answer.token_ids, strict=True):
            assert 1 <= len(token_set) <= 20
            expected.append(row[token_set].log_softmax(-1)[token_set.tolist().index(token)])
        assert_log_probs(answer, torch.stack(expected))


async def assert_frequencies(engine, model):
    """Compare the first tokens of 1,600 answers with the model's probabilities, in 16 bins of about equal weight."""
    answers = await generate(engine, [PROMPTS[0]], 1600, max_new_tokens=1)
    probs = model(torch.tensor([PROMPTS[0]])).logits[0, -1].double().softmax(-1)
    order = probs.argsort(descending=True)
    bins = torch.empty_like(order)
    bins[order] = (probs[order].cumsum(0) * 16).long().clamp(max=15)
    expected = torch.zeros(16, dtype=torch.double).index_add(0, bins, probs) * len(answers)
    counts = torch.bincount(bins[[answer.token_ids[0] for answer in answers]], minlength=16).double()
    filled = expected > 5
    assert float(((counts - expected)[filled] ** 2 / expected[filled]).sum()) < CHI_SQUARE_999


async def assert_stops(engine):
    (free,) = await generate(engine, [PROMPTS[0]], 1, max_new_tokens=24, temperature=0.0)
    stop = free.token_ids[3]
    (ended,) = await generate(engine, [PROMPTS[0]], 1, temperature=0.0, stop_token_ids=(stop,))
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1] and ended.finish_reason == "stop"
    text = byte_tokenizer().decode(free.token_ids[3:7])
    (ended,) = await generate(engine, [PROMPTS[0]], 1, max_new_tokens=24, temperature=0.0, stop_texts=("*", text))
    assert ended.token_ids == free.token_ids[:7] and ended.finish_reason == "stop" and len(ended.log_probs) == 7
    assert free.finish_reason == "length"


async def assert_teaches(engine, model):
    """Ask for the log-probs of given tokens, as for a teacher's; the guard wants the key for control calls."""
    client = VllmClient(engine.servers.all[0].client.url, 4, 60.0, key=KEYS.admin)
    pairs = await client.input_log_probs([*PROMPTS[0], 8, 9, 10], first=3)
    await client.close()
    assert [token for token, _ in pairs] == [8, 9, 10]
    expected = log_probs_of(model, PROMPTS[0], [8, 9, 10])
    assert [value for _, value in pairs] == pytest.approx(expected.tolist(), abs=SERVER_LOG_PROB_ERROR)


@pytest.mark.parametrize(("number", "mode"), [(signal.SIGKILL, "broadcast"), (signal.SIGSTOP, "ipc")])
async def test_a_server_that_ends_or_hangs_is_replaced_and_every_request_answered(folder, tmp_path, number, mode):
    model = other_weights(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    quick = {"rollout_health_check_interval": 1.0, "rollout_health_check_timeout": 10.0}
    quick |= {"update_weight_transfer_mode": mode, "check_weight_update_equal": True}
    async with started(folder, tmp_path, use_fault_tolerance=True, **quick) as (engine, hosts):
        await engine.update_weights(list(in_chunks(model.named_parameters(), bucket_bytes=20_000)), 3)
        running = asyncio.ensure_future(generate(engine, max_new_tokens=100))
        await asyncio.sleep(0.1)
        group = psutil.Process(hosts[0].pid)
        processes = [*group.children(recursive=True), group]
        segments = open_segments(processes)
        for process in processes:
            process.send_signal(number)
        answers = await running
        assert_of(model, answers)
        assert {answer.weight_version for answer in answers} == {3} and engine.servers.all[0].starts == 2
    assert segments and not any(Path(segment).exists() for segment in segments)
