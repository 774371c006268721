"""The HTTP server as a client sees it, over real sockets."""

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest

from miles.config.settings import Settings
from miles.rollout.agents.chat import ChatFormat
from miles.rollout.agents.generator import AgentGenerator
from miles.rollout.agents.server import SessionServer
from miles.rollout.agents.session import Session

USER = {"role": "user", "content": "ab"}


@pytest.fixture
async def server():
    server = await SessionServer.start()
    yield server
    await server.close()


@pytest.fixture
def open_session(server, random_engine, new_trajectory):
    def make(engine=None):
        trajectory = new_trajectory(engine or random_engine())
        session = Session(trajectory, ChatFormat(trajectory.tokenizer), takes_stop_texts=True)
        return session, server.serving(session)

    return make


async def post(server, key, body, path="/chat/completions", method="post"):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    data = body if isinstance(body, str) else json.dumps(body)
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, server.url + path, data=data, headers=headers) as r,
    ):
        return r.status, await r.text()


async def test_the_openai_client_talks_to_it(server, open_session, random_engine):
    openai = pytest.importorskip("openai")
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    engine = random_engine(texts=["cd", call, "ab", "abc"])
    session, serving = open_session(engine)

    def program(key):
        client = openai.OpenAI(base_url=server.url, api_key=key, max_retries=0)
        assert [model.id for model in client.models.list()] == ["policy"]
        messages = [USER]
        create = client.chat.completions.create
        first = create(model="gpt-4o", messages=messages, temperature=0.3)
        assert first.choices[0].finish_reason == "stop" and first.usage.completion_tokens == 2 + 1 - 1
        messages += [first.choices[0].message, USER]
        second = create(model="gpt-4o", messages=messages, tools=[tool])
        messages.append(second.choices[0].message)
        [made] = second.choices[0].message.tool_calls
        assert second.choices[0].finish_reason == "tool_calls" and json.loads(made.function.arguments) == {"a": 1}
        messages.append({"role": "tool", "tool_call_id": made.id, "content": "2"})
        streamed = create(
            model="x", messages=messages, tools=[tool], stream=True, stream_options={"include_usage": True}
        )
        chunks = list(streamed)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "ab" and chunks[-2].choices[0].finish_reason == "stop" and chunks[-1].usage.total_tokens > 0
        with pytest.raises(openai.BadRequestError, match="n 2: must be 1"):
            create(model="x", messages=messages, n=2)
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=server.url, api_key="sk-wrong", max_retries=0).models.list()

    async with serving as key:
        await asyncio.to_thread(program, key)
    samples = session.samples("")  # other tools begin another sample
    assert [sum(mask) for mask in (s.loss_mask for s in samples)] == [
        len(engine.answers[0][1].token_ids),
        sum(len(g.token_ids) for _, g in engine.answers[1:]),
    ]


async def test_a_key_is_needed_and_ends_with_its_session(server, open_session):
    _, serving = open_session()
    body = {"messages": [USER]}
    async with serving as key:
        for wrong in (None, "", "sk-wrong", key[:-1]):
            status, text = await post(server, wrong, body)
            assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"
            assert (await post(server, wrong, body, "/models", "get"))[0] == 401
        assert (await post(server, key, body))[0] == 200
    assert (await post(server, key, body))[0] == 401


async def test_sessions_do_not_see_each_other(server, open_session):
    (one, serving_one), (two, serving_two) = open_session(), open_session()
    async with serving_one as key_one, serving_two as key_two:
        assert key_one != key_two
        answer = json.loads((await post(server, key_one, {"messages": [USER]}))[1])["choices"][0]["message"]
        await post(server, key_two, {"messages": [USER, answer, USER]})
    assert len(one.samples("")) == len(two.samples("")) == 1
    assert 0 not in two.samples("")[0].loss_mask  # its whole conversation is a prompt


@pytest.mark.parametrize(
    ("path", "method", "body", "status", "fault"),
    [
        ("/chat/completions", "post", "{", 400, "the body is not JSON"),
        ("/chat/completions", "post", b"\xff".decode("latin1"), 400, "the body is not JSON"),
        ("/chat/completions", "post", {"messages": []}, 400, "empty"),
        ("/chat/completions", "get", "", 405, "Method Not Allowed"),
        ("/embeddings", "post", "{}", 404, "Not Found"),
    ],
)
async def test_errors_have_openais_form(server, open_session, path, method, body, status, fault):
    _, serving = open_session()
    async with serving as key:
        got, text = await post(server, key, body, path, method)
    error = json.loads(text)["error"]
    assert got == status and fault in error["message"] and error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("stops", "fault"),
    [
        (
            ["a", "b", "c"],
            "stop: the engine takes at most 32 texts, 30 of them from --rollout-stop; give at most 2 others",
        ),
        (["." * 129], "the engine takes a regular expression of at most 256 bytes, and for this text it has 258"),
    ],
)
async def test_stop_texts_beyond_the_limits_of_sglang_are_refused(server, random_engine, new_trajectory, stops, fault):
    of_run = tuple(f"stop {number}" for number in range(30))
    rollout = replace(
        Settings().rollout, agent_command="true", rollout_engine="sglang", rollout_stop=of_run, partial_rollout=False
    )
    engine = random_engine()
    trajectory = new_trajectory(engine)
    trajectory = replace(trajectory, sampling=replace(trajectory.sampling, stop_texts=of_run))
    generator = AgentGenerator(replace(Settings(), rollout=rollout))
    async with generator._recording(trajectory) as session, server.serving(session) as key:
        status, text = await post(server, key, {"messages": [USER], "stop": stops})
        error = json.loads(text)["error"]
        assert (status, error["param"]) == (400, "stop") and fault in error["message"]
        assert not engine.answers, "the engine is not asked"
        assert (await post(server, key, {"messages": [USER], "stop": ["." * 128, "b", of_run[0]]}))[0] == 200
    assert engine.answers[0][0].sampling.stop_texts == (*of_run, "." * 128, "b")


async def test_a_call_whose_client_has_gone_is_not_recorded(server, open_session, random_engine):
    engine = random_engine()
    asked, gone = asyncio.Event(), asyncio.Event()

    async def wait(request):
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    engine.generate = wait
    session, serving = open_session(engine)
    async with serving as key:
        call = asyncio.ensure_future(post(server, key, {"messages": [USER]}))
        await asked.wait()
        assert session.busy.is_set()
        call.cancel()
        await asyncio.wait_for(gone.wait(), 30)
        await asyncio.wait_for(session.idle.wait(), 30)
    assert not session.has_answered


async def test_closing_ends_the_calls_that_wait(server, open_session, random_engine):
    engine = random_engine()
    asked = asyncio.Event()

    async def wait(request):
        asked.set()
        await asyncio.Event().wait()

    engine.generate = wait
    session, serving = open_session(engine)
    async with serving as key:
        call = asyncio.ensure_future(post(server, key, {"messages": [USER]}))
        await asked.wait()
        await session.close()
        status, text = await call
    assert status == 503 and "has ended" in text


async def test_it_listens_on_the_loopback_interface_only(server):
    assert server.url.startswith("http://127.0.0.1:")
