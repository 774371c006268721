"""A teacher in servers: the requests, the choice of a server, and answers that are not sound."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles.engine.servers.client import EngineUnavailable, RequestRefused
from miles.engine.servers.teacher import TeacherServers
from miles.types.sample import Prompt, Sample

PASSWORD = "hunter2secret"


class Server:
    """Answers as SGLang and vLLM do; each log-prob tells the server and the token."""

    def __init__(self, offset: float) -> None:
        self.offset = offset
        self.bodies: list[dict] = []
        self.faults: list[str] = []  # of the next requests

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if "prompt" in body:
            tokens = [None, *({str(t): {"logprob": -self.offset - t / 100}} for t in body["prompt"][1:])]
            return web.json_response({"choices": [{"prompt_logprobs": tokens}]})
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "500":
            raise web.HTTPInternalServerError()
        if fault == "400":
            raise web.HTTPBadRequest(text="too long")
        first = body["logprob_start_len"]
        entries = [[-self.offset - token / 100, token, None] for token in body["input_ids"][first:]]
        entries[0][0] = None  # SGLang does not predict the first
        if fault == "other tokens":
            entries[-1][1] += 1
        if fault == "not a number":
            entries[-1][0] = None
        return web.json_response({"output_ids": [], "meta_info": {"input_token_logprobs": entries}})


@asynccontextmanager
async def teachers(*names, waits=(0.0, 0.0), of_vllm=()):
    servers = {name: Server(number) for number, name in enumerate(names)}
    running = {}
    for name, server in servers.items():
        app = web.Application()
        app.add_routes([web.post(path, server.generate) for path in ("/generate", "/v1/completions")])
        running[name] = TestServer(app)
        await running[name].start_server()
    urls = {
        name: str(test.make_url("v1" * (name in of_vllm)).with_user("me").with_password(PASSWORD)).rstrip("/")
        for name, test in running.items()
    }
    teacher = TeacherServers(urls, "subject", waits)
    try:
        yield teacher, servers
    finally:
        await teacher.close()
        for test in running.values():
            await test.close()


def sample(prompt, response, subject=None):
    return Sample(Prompt("", tuple(prompt), metadata={"subject": subject}, source="p:1"), 0, 0, response_ids=response)


async def test_every_response_token_gets_the_log_prob_of_its_teacher():
    samples = [sample([7, 8], [1, 2], "math"), sample([9], [3], "code"), sample([9], [], "code")]
    async with teachers("math", "code", of_vllm=["code"]) as (teacher, servers):
        await teacher.score(samples)
    assert [s.teacher_log_probs for s in samples] == [[-0.01, -0.02], [-1.03], []]
    (body,) = servers["math"].bodies
    assert body["input_ids"] == [7, 8, 1, 2] and body["logprob_start_len"] == 1
    assert body["return_logprob"] and body["sampling_params"]["max_new_tokens"] == 0
    (body,) = servers["code"].bodies
    assert body == {"prompt": [9, 3], "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}


async def test_a_single_teacher_needs_no_name():
    alone = sample([7], [1])
    async with teachers("") as (teacher, _):
        await teacher.score([alone])
    assert alone.teacher_log_probs == [-0.01]


@pytest.mark.parametrize("fault", ["500", "not a number"])
async def test_a_request_without_a_sound_answer_is_sent_again(fault):
    async with teachers("") as (teacher, servers):
        servers[""].faults = [fault, fault]
        await teacher.score([good := sample([7], [1])])
        assert good.teacher_log_probs == [-0.01]
        servers[""].faults = [fault] * 3
        with pytest.raises(EngineUnavailable, match=r"http://\(hidden\)@.* (HTTP 500|without log-probs)") as caught:
            await teacher.score([sample([7], [1])])
        assert PASSWORD not in str(caught.value)


async def test_what_no_repetition_changes_stops_the_run():
    async with teachers("math", "code") as (teacher, servers):
        servers["math"].faults = ["other tokens"]
        with pytest.raises(ValueError, match="must have the tokenizer of --hf-checkpoint"):
            await teacher.score([sample([7], [1], "math")])
        servers["math"].faults = ["400"]
        with pytest.raises(RequestRefused, match="too long"):
            await teacher.score([sample([7], [1], "math")])
        with pytest.raises(ValueError, match=r"prompt p:1 has subject 'art', which is none of math, code"):
            await teacher.score([sample([7], [1], "art")])
        assert len(servers["math"].bodies) == 2
