"""The engine of vLLM servers, over real processes that answer like one (``fake_vllm``)."""

import asyncio
import math
import os
import re
import signal
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from vision_models import png, write_vision_model

from miles.config.servers.flags import SglangArguments
from miles.config.servers.passed_on import ServerFlags
from miles.engine.base import GenerationRequest, LocalServer, SamplingParams
from miles.engine.servers.client import EngineUnavailable, RequestRefused
from miles.engine.servers.keys import keys_of
from miles.engine.servers.launch import ServerOnHost
from miles.engine.servers.processes import LogFile
from miles.engine.vllm import launch
from miles.engine.vllm.client import TIES, read_generation, sampling_params
from miles.engine.vllm.engine import VllmEngine
from miles.engine.vllm.launch import VllmProgram
from miles.engine.weight_sync.sender import WeightSender
from miles.types.images import PromptImages
from miles.types.weights import WeightChunk

KEYS = keys_of(ServerFlags(), external=False)
PROGRAM = VllmProgram("some/model", "float32", "cpu", 1, 7, KEYS)
WEIGHTS = [WeightChunk({"w": torch.zeros(3)})]
HALF = math.log(0.5)


class FakeProgram(VllmProgram):
    """The program with the fake in vLLM's place, and this environment's packages."""

    def check(self):
        """Do nothing: the fake is here."""

    def environment(self, base, folder):
        made = super().environment(base, folder)
        return made | {"PYTHONPATH": os.pathsep.join([made["PYTHONPATH"], str(Path(__file__).parent)])}


@asynccontextmanager
async def started(folder, monkeypatch, number=1, **flags):
    monkeypatch.setattr(launch, "MODULE", "fake_vllm")
    program = FakeProgram(**vars(PROGRAM))
    hosts = [ServerOnHost(program, LogFile(folder / f"{n}.log"), "127.0.0.1") for n in range(number)]
    sglang = SglangArguments(**{"update_weight_transfer_mode": "disk", "rollout_health_check_interval": 0.3, **flags})
    servers = [LocalServer(n, host) for n, host in enumerate(hosts)]
    engine = VllmEngine(servers, sglang, 100, WeightSender(sglang, folder / "weights"), None, keys=KEYS)
    try:
        async with asyncio.timeout(120):
            await engine.start()
            yield engine, hosts
    finally:
        await engine.close()


def request(*prompt, seeds=(0,), **sampling):
    return GenerationRequest(prompt, seeds, SamplingParams(max_new_tokens=8, **sampling))


async def seen(engine, number=0):
    url = engine.servers.all[number].client.url
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEYS.admin}"}) as http:
        return (await http.get(f"{url}/seen")).json()


async def test_a_request_per_seed_is_answered_with_tokens_log_probs_and_version(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as (engine, _):
        answers = await engine.generate(request(3, 4, seeds=(11, 12)))
        assert [answer.token_ids for answer in answers] == [[4, 3], [4, 3]]
        assert answers[0].log_probs == [HALF, HALF] and answers[0].weight_version == 0
        asked = (await seen(engine))["requests"]
        assert sorted(body["sampling_params"]["seed"] for body in asked) == [11, 12]
        (generation,) = await engine.generate(request(3, 4, top_k=5, returns_support=True))
        assert generation.support.sizes.tolist() == [2, 2] and bool(generation.support.contain([0, 0]).all())
        with pytest.raises(RequestRefused, match="--rollout-top-k"):
            await engine.generate(request(3, top_k=7, returns_support=True))
        with pytest.raises(ValueError, match="outside the model's vocabulary"):
            await engine.generate(request(100))


async def test_a_server_must_read_a_prompt_with_images_as_it_was_rendered(tmp_path, monkeypatch):
    model = write_vision_model(tmp_path / "vision", "qwen2_5_vl")
    images = PromptImages((png(1),), ((8, 8),), (3,), (1,), 7, model, "rows.jsonl:2")
    async with started(tmp_path, monkeypatch) as (engine, _):
        (answer,) = await engine.generate(replace(request(5, 7, 7, 7, 6), images=images))
        assert answer.token_ids == [6, 7, 5], "one placeholder is sent"
        (part,) = (await seen(engine))["requests"][-1]["content_parts"]
        assert part["type"] == "image_url" and part["url"].startswith("data:image/png;base64,")
        longer = replace(request(5, 7, 7, 7, 7, 6), images=replace(images, counts=(4,)))
        with pytest.raises(RequestRefused, match="rows.jsonl:2: .* as 5 tokens, .* with 6;"):
            await engine.generate(longer)


async def test_an_update_reads_the_folder_empties_the_cache_and_then_sets_the_version(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as (engine, _):
        await engine.update_weights(WEIGHTS, 3)
        paths = [path for path, _ in (await seen(engine))["calls"]]
        assert paths == [
            "/pause?mode=keep&clear_cache=false",
            "/collective_rpc",
            "/reset_prefix_cache?reset_running_requests=true",
            "/reset_encoder_cache",
            "/resume",
        ]
        assert (await engine.generate(request(3)))[0].weight_version == 3


@pytest.mark.parametrize("mode", ["broadcast", "ipc"])
async def test_weights_arrive_over_a_process_group_and_through_shared_memory(tmp_path, monkeypatch, mode):
    chunks = [WeightChunk({name: torch.full((2, 1), value)}) for name, value in (("a", 1.0), ("b", 2.0))]
    async with started(tmp_path, monkeypatch, update_weight_transfer_mode=mode) as (engine, _):
        for version in (3, 4):
            await engine.update_weights(chunks, version)
        calls = (await seen(engine))["calls"]
        assert (await engine.generate(request(3)))[0].weight_version == 4
    assert calls[: len(calls) // 2] * 2 == calls and [path for path, _ in calls[:8]] == [
        "/pause?mode=keep&clear_cache=false",
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
        "/reset_prefix_cache?reset_running_requests=true",
        "/reset_encoder_cache",
        "/resume",
    ]
    assert [body for _, body in calls[2:4]] == [{"a": [[1.0], [1.0]]}, {"b": [[2.0], [2.0]]}]


async def test_in_place_the_cache_stays_and_later_requests_do_not_find_it(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch, pause_generation_mode="in_place") as (engine, _):
        await engine.update_weights(WEIGHTS, 3)
        await engine.generate(request(3))
        record = await seen(engine)
        assert not [path for path, _ in record["calls"] if path.startswith("/reset_prefix_cache")]
        assert record["requests"][-1]["cache_salt"] == "3"


async def test_an_answer_names_the_weights_of_each_token_and_an_abort_returns_what_there_is(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as (engine, _):
        await engine.update_weights(WEIGHTS, 3)
        running = asyncio.create_task(engine.generate(request(9, 4, 5)))
        while not (await seen(engine))["requests"]:
            await asyncio.sleep(0.02)
        await engine.update_weights(WEIGHTS, 4)  # it resumes, and the request ends
        (answer,) = await running
        assert answer.token_versions == [3, 4, 4]
        running = asyncio.create_task(engine.generate(request(9, 4)))
        while len((await seen(engine))["requests"]) < 2:
            await asyncio.sleep(0.02)
        await engine.abort()
        assert (await running)[0].finish_reason == "abort"


async def test_a_killed_server_is_replaced_with_its_weights_and_others_take_its_requests(
    tmp_path, monkeypatch, capsys, caplog
):
    async with started(tmp_path, monkeypatch, number=2, use_fault_tolerance=True) as (engine, hosts):
        await engine.update_weights(WEIGHTS, 3)
        await engine.generate(request(3, seeds=range(6)))
        assert all([len((await seen(engine, n))["requests"]) == 3 for n in range(2)])  # each goes to the idler one
        os.kill(hosts[0].pid, signal.SIGKILL)
        answers = [(await engine.generate(request(3)))[0] for _ in range(4)]
        assert {answer.weight_version for answer in answers} == {3}
        while engine.servers.all[0].starts < 2 or not engine.servers.all[0].in_use:
            await asyncio.sleep(0.05)
    assert "engine 0 has failed and is restarted: its process ended by SIGKILL" in caplog.text
    lines = capsys.readouterr().err
    ports = re.findall(
        rf"^starting the vLLM server on port (\d+); its log is {tmp_path}/[01].log$", lines, re.MULTILINE
    )
    ready = re.findall(r"^the vLLM server on port (\d+) is ready after \d+ s$", lines, re.MULTILINE)
    assert len(ports) == 3 and set(ports) == set(ready)


async def test_nobody_calls_a_server_without_its_keys(tmp_path, monkeypatch):
    async with started(tmp_path, monkeypatch) as (engine, _):
        url = engine.servers.all[0].client.url
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{url}/health")).status_code == 200
            for key in (None, KEYS.server, "x"):
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                for path in ("/collective_rpc", "/pause", "/abort_requests", "/v1/completions"):
                    assert (await http.post(url + path, json={}, headers=headers)).status_code == 401
        log = (tmp_path / "0.log").read_text()
        assert KEYS.admin not in log and KEYS.server not in log


def test_a_server_listens_on_loopback_only():
    with pytest.raises(ValueError, match="loopback"):
        PROGRAM.arguments("10.0.0.1", 1)


def test_the_command_line_has_what_the_run_says_and_the_flags_of_the_user():
    program = replace(PROGRAM, flags=("--dtype", "bfloat16", "--max-num-seqs", "8"), reads_text=True)
    words = program.arguments("127.0.0.1", 1)
    assert words.count("--dtype") == 1 and words[words.index("--dtype") + 1] == "bfloat16"
    assert "--no-enable-chunked-prefill" in words  # vLLM ends on CPU with seeds and prompts in parts
    assert "--skip-tokenizer-init" not in words and words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
    raw = replace(PROGRAM, raw_log_probs=True).arguments("127.0.0.1", 1)
    assert raw[raw.index("--logprobs-mode") + 1] == "raw_logprobs" and "--skip-tokenizer-init" in raw
    assert "--skip-tokenizer-init" not in replace(PROGRAM, reads_images=True).arguments("127.0.0.1", 1)


def test_a_run_without_vllm_is_refused_with_the_one_command(tmp_path):
    server = ServerOnHost(replace(PROGRAM, python=str(tmp_path / "python")), LogFile(tmp_path / "log"), "127.0.0.1")
    with pytest.raises(ValueError, match="bash scripts/vllm.sh"):
        server.start()


def test_sampling_under_vllms_names():
    sampling = SamplingParams(5, 0.7, 0.9, 10, (2,), ("end",), 0.1, returns_support=True)
    assert sampling_params(sampling, seed=2**40, vocab=1000) == {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 10,
        "min_p": 0.1,
        "seed": 2**40,
        "logprobs": 10 + TIES,
        "stop_token_ids": [2],
        "skip_special_tokens": False,
        "stop": ["end"],
        "include_stop_str_in_output": True,
    }


SOUND = {
    "token_ids": [4],
    "logprobs": {"content": [{"token_id": 4, "logprob": -0.5, "top_logprobs": []}]},
    "weight_versions": [{"version": "3", "start": 0, "end": 1}],
    "finish_reason": "stop",
}
UNSOUND = [
    {"token_ids": [5]},
    {"weight_versions": None},
    {"finish_reason": "error"},
    {"logprobs": None},
    {"logprobs": {"content": [{"token_id": 4, "logprob": math.nan}]}},
    {"logprobs": {"content": [{"token_id": 4, "logprob": 0.5}]}},
]


@pytest.mark.parametrize("fault", UNSOUND)
def test_an_answer_that_is_no_generation_is_not_used(fault):
    assert read_generation({"choices": [SOUND]}, 10).token_versions == [3]
    with pytest.raises(EngineUnavailable):
        read_generation({"choices": [SOUND | fault]}, 10)
    with pytest.raises(EngineUnavailable):
        read_generation({"error": "none"}, 10)
