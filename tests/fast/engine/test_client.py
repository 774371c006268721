"""How the client parses a server's answer, and how long it waits."""

import asyncio
import base64
import math
import re

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles.engine.base import Generation, GenerationRequest, SamplingParams
from miles.engine.servers import client as servers_client
from miles.engine.servers.client import SLOWEST_TRANSFER, EngineUnavailable, RequestRefused
from miles.engine.servers.keys import NO_KEYS
from miles.engine.servers.requests import Requests, ServersSenderConfig
from miles.engine.sglang.client import SglangClient, SglangReceiver, read_experts, read_generation, sampling_params
from miles.engine.vllm.client import VllmClient
from miles.engine.weight_sync.deltas import WeightFolder
from miles.types.weights import WeightChunk


def answer(tokens, *spans, version="7"):
    meta = {
        "finish_reason": {"type": "stop"},
        "weight_version": version,
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in spans],
    }
    return {"output_ids": tokens, "meta_info": meta}


@pytest.mark.parametrize(
    ("spans", "versions"),
    [
        ([], [7, 7, 7, 7]),
        ([("7", 0, 4)], [7, 7, 7, 7]),
        ([("5", 0, 1), ("6", 1, 3), ("7", 3, 4)], [5, 6, 6, 7]),
        ([("default", 0, 3), ("7", 3, 4)], [-1, -1, -1, 7]),
    ],
)
def test_each_token_has_the_version_of_its_span(spans, versions):
    assert read_generation(answer([1, 2, 3, 4], *spans), vocab=9).token_versions == versions


@pytest.mark.parametrize("spans", [[("5", 0, 9), ("7", 9, 10)], [("5", 0, "x"), ("7", 1, 2)]])
def test_spans_that_do_not_match_the_response_are_refused(spans):
    with pytest.raises(EngineUnavailable, match="no generation"):
        read_generation(answer([1, 2], *spans), vocab=9)


@pytest.mark.parametrize("text", ["\n\n", "1. a", "答案：", "🛑", "naïve"])
def test_sglang_looks_at_enough_tokens_for_a_stop_text(text):
    """It looks at as many as the longest match of the pattern has characters, and a token may be one byte."""
    (pattern,) = sampling_params(SamplingParams(8, stop_texts=(text,)), seed=0)["stop_regex"]
    _, longest = re._parser.parse(pattern).getwidth()
    assert longest == len(text.encode())
    assert re.search(pattern, f"before{text}") and re.search(pattern, f"{text}after")
    assert not re.search(pattern, text[:-1])


def with_support(tokens, sets, log_probs):
    made = answer(tokens)
    made["meta_info"] |= {"output_token_sampling_mask": sets, "output_token_sampling_logprobs": log_probs}
    return made


def test_log_probs_are_over_the_support_if_it_was_asked_for():
    made = with_support([1, 2], [[3, 1], [2]], [-0.5, 0.0])
    result = read_generation(made, vocab=9, with_support=True)
    assert [one.tolist() for one in result.support.sets()] == [[1, 3], [2]] and result.log_probs == [-0.5, 0.0]
    plain = read_generation(made, vocab=9)
    assert plain.support is None and plain.log_probs == [-1.0, -1.0]
    aborted = answer([])
    aborted["meta_info"]["finish_reason"]["type"] = "abort"
    assert len(read_generation(aborted, vocab=9, with_support=True).support) == 0


@pytest.mark.parametrize(
    "made",
    [
        with_support([1, 2], [[1]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [3]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [2, 9]], [-0.5, 0.0]),
        with_support([1, 2], [[1], [2]], [-0.5]),
        with_support([1, 2], [[1], [2]], [-0.5, float("nan")]),
        with_support([1, 2], [[1], [2, -1]], [-0.5, -0.5]),
        with_support([1, 2], [[1], []], [-0.5, -0.5]),
    ],
)
def test_supports_that_do_not_fit_the_tokens_are_refused(made):
    with pytest.raises(EngineUnavailable, match="kept tokens"):
        read_generation(made, vocab=9, with_support=True)


def test_a_server_that_knows_no_supports_is_named():
    with pytest.raises(RequestRefused, match="SGLang 0.5.23 .* or add --no-support-replay"):
        read_generation(answer([1, 2]), vocab=9, with_support=True)


def test_experts_are_read_in_the_smallest_dtype():
    for largest, dtype in ((255, np.uint8), (300, np.int16)):
        wanted = np.arange(2 * 3 * 2, dtype=np.int32).reshape(2, 3, 2)
        wanted[1, 2, 1] = largest
        packed = base64.b64encode(wanted.tobytes()).decode()
        experts = read_experts({"routed_experts": packed}, (2, 3, 2))
        assert experts.dtype == dtype and np.array_equal(experts, wanted)


@pytest.mark.parametrize("value", ["", "AAAA", "?", 3, base64.b64encode(np.full(12, -1, np.int32).tobytes()).decode()])
def test_experts_of_another_shape_are_refused(value):
    with pytest.raises(EngineUnavailable, match="experts"):
        read_experts({"routed_experts": value}, (2, 3, 2))
    with pytest.raises(RequestRefused, match="start it with --enable-return-routed-experts"):
        read_experts({}, (2, 3, 2))


@pytest.mark.parametrize("installed", [True, False], ids=["orjson", "json"])
def test_json_is_the_same_with_and_without_orjson(monkeypatch, installed):
    if not installed:
        monkeypatch.setattr(servers_client, "orjson", None)
    content = {"ids": (1, 2**40), "more": range(3), "big": 2**70, "text": "ä\n", "none": None, "value": -0.1}
    sent = servers_client.encode(content)
    assert servers_client.decode(sent) == content | {"ids": [1, 2**40], "more": [0, 1, 2]}
    assert math.isnan(servers_client.decode(b"[NaN, 1]")[0])
    for broken in (b"", b"{", b"\xff"):
        with pytest.raises(ValueError):
            servers_client.decode(broken)
    with pytest.raises(TypeError):
        servers_client.encode(object())


@pytest.mark.parametrize(
    "entries", [[[-0.1, 1], [-0.2]], [[-0.1, 1], None], [[-0.1, 1], ["x", 2]], [[-0.1, 2], [-0.1, 1]]]
)
def test_log_probs_that_are_not_of_the_tokens_are_no_generation(entries):
    made = answer([1, 2])
    made["meta_info"]["output_token_logprobs"] = entries
    with pytest.raises(EngineUnavailable, match="generation"):
        read_generation(made, vocab=9)


def test_numbers_in_an_answer_may_be_of_either_kind():
    made = answer([1, 2])
    made["output_ids"] = [1.0, 2]
    made["meta_info"]["output_token_logprobs"] = [[0, 1.0, None], [-0.5, 2, None]]
    result = read_generation(made, vocab=9)
    assert (result.token_ids, result.log_probs) == ([1, 2], [0.0, -0.5])
    assert {type(token) for token in result.token_ids} == {int} and {type(p) for p in result.log_probs} == {float}


async def test_an_update_does_not_wait_for_a_server_that_hangs():
    async def hang(request):
        await asyncio.Event().wait()

    app = web.Application()
    app.add_routes([web.post("/{part}_weight_update", hang), web.post("/update_weights_from_{source}", hang)])
    chunk = WeightChunk({"a": torch.zeros(1000)})
    async with TestServer(app) as server:
        client = SglangClient(str(server.make_url("")).rstrip("/"), 1, seconds=0.2)
        receiver = SglangReceiver(client, 1, flush=False, process=None)
        for call in (
            receiver.begin_update(),
            receiver.receive_shared([b""], chunk.nbytes, 1, last=False),
            receiver.receive_broadcast(chunk, "group", 1, last=False),
            receiver.load_folder(WeightFolder("weights", 4000), 1),
            receiver.end_update(),
        ):
            with pytest.raises(EngineUnavailable, match="Timeout"):
                await asyncio.wait_for(call, 60)
        await client.close()


async def test_a_server_has_the_longer_to_end_an_update_the_more_weights_it_has_received():
    async def take(request):
        return web.json_response({"success": True})

    async def convert(request):
        await asyncio.sleep(1)  # work: longer than a health check may take
        return web.json_response({"success": True})

    app = web.Application()
    app.add_routes([web.post("/update_weights_from_tensor", take), web.post("/end_weight_update", convert)])
    async with TestServer(app) as server:
        client = SglangClient(str(server.make_url("")).rstrip("/"), 1, seconds=0.2)
        receiver = SglangReceiver(client, 1, flush=False, process=None)
        for _ in range(2):
            await receiver.receive_shared([b""], int(30 * SLOWEST_TRANSFER), 1, last=False)
        await receiver.end_update()
        await client.close()


@pytest.mark.parametrize("kind", [SglangClient, VllmClient])
@pytest.mark.parametrize("listens", [True, False])
async def test_a_call_is_waited_for_while_its_server_listens(monkeypatch, kind, listens):
    monkeypatch.setattr(servers_client, "LISTENING_SECONDS", 0.01)

    async def take(reader, writer):
        await reader.readuntil(b"{}")
        if listens:
            await asyncio.sleep(0.1)  # work: several looks long
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        else:
            server.close()  # its connections stay open

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = kind(f"http://{host}:{port}", 1, seconds=60)
    if listens:
        assert await client.control("/load", {}) == {}
    else:
        with pytest.raises(EngineUnavailable, match="no longer listens"):
            await asyncio.wait_for(client.control("/load", {}), 30)
    await client.close()
    server.close()


class _Recorder:
    """A client and the only server, which keep what they are asked."""

    restarts, version, oldest, name = False, None, None, "recorder"

    def __init__(self):
        self.requests, self.client, self.in_use, self.asked = set(), self, [self], []

    async def until_one_in_use(self):
        """Be in use."""

    async def generate(self, request, *others):
        self.asked.append(request.sampling.stop_token_ids)
        return Generation([5], [-1.0], "stop", 0)


def test_servers_are_given_the_models_end_tokens():
    recorder = _Recorder()
    config = ServersSenderConfig(SglangClient, 1, 100, frozenset({7, 3}), False, False, None, NO_KEYS, None, 1.0, "")
    requests = Requests(recorder, config, 1, asyncio.sleep)
    request = GenerationRequest((1,), (0,), SamplingParams(4, stop_token_ids=(9, 3)))
    asyncio.run(requests.generate(request))
    assert [sorted(ids) for ids in recorder.asked] == [[3, 7, 9]]
