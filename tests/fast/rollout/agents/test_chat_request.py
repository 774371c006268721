"""Which calls are read, and how the others are refused."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.agents.chat import ApiError, ToolCall, parse_tool_calls, read_request

USER = {"role": "user", "content": "hello"}


def read(**body):
    return read_request(json.dumps({"model": "gpt-4o", "messages": [USER], **body}))


def test_a_call_is_read():
    call = read(
        messages=[
            {"role": "system", "content": None},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
            },
        ],
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0.2,
        stop="end",
        stream=None,
        user="somebody",
    )
    assert [message["content"] for message in call.messages] == ["", "ab", ""]
    assert call.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (call.max_tokens, call.stop, call.sampling) == (7, ("end",), ("temperature",))


def test_tools_are_hidden_by_tool_choice_none():
    tool = {"type": "function", "function": {"name": "f"}}
    assert read(tools=[tool]).tools == (tool,)
    assert read(tools=[tool], tool_choice="none").tools == ()


@pytest.mark.parametrize(
    ("body", "param", "fault"),
    [
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hello"}, "messages", "of type str"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", r"messages\[0\]: give an object whose role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "must be text"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", "parts of type text"),
        ({"messages": [{**USER, "tool_calls": [1]}]}, "messages", "the assistant's"),
        ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages", "no function with a name"),
        ({"n": 2}, "n", "n 2: must be 1"),
        ({"logprobs": True}, "logprobs", "must be false"),
        ({"response_format": {"type": "json_object"}}, "response_format", "must be"),
        ({"tool_choice": "required"}, "tool_choice", 'must be "auto" or "none"'),
        ({"tools": [{"type": "web_search"}]}, "tools", r"tools\[0\]"),
        ({"max_tokens": 0}, "max_completion_tokens", "at least 1"),
        ({"max_tokens": True}, "max_tokens", "of type bool"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"stream": "yes"}, "stream", "of type str"),
        ({"guided_json": {}}, "guided_json", "not known here"),
    ],
)
def test_a_wrong_call_is_refused_with_the_parameter(body, param, fault):
    with pytest.raises(ApiError, match=fault) as refused:
        read(**body)
    assert refused.value.status == 400 and refused.value.param == param
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"messages": [], "messages": []}', '{"n": ' + "[" * 200 + "]" * 200 + "}"]
)
def test_what_is_no_object_is_refused(text):
    with pytest.raises(ApiError, match="the body is"):
        read_request(text)


TAGS = st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "</think>", '"', "{", "a\n"]), max_size=5).map("".join)


def written(name, arguments, key="arguments"):
    return f"<tool_call>\n{json.dumps({'name': name, key: arguments})}\n</tool_call>"


@given(st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=3), st.sampled_from(["arguments", "parameters"]))
def test_calls_are_read_whatever_their_names_and_arguments_hold(calls, key):
    text = "see " + "\n".join(written(name, {"x": value}, key) for name, value in calls)
    expected = [ToolCall(name, json.dumps({"x": value}, ensure_ascii=False)) for name, value in calls]
    assert parse_tool_calls(text) == ("see", expected)


def test_arguments_may_be_their_json_or_nothing():
    for value, expected in (('{"x":  1}', '{"x":  1}'), ("", "{}"), (" ", "{}"), (None, "{}")):
        assert parse_tool_calls(written("f", value)) == ("", [ToolCall("f", expected)])


@pytest.mark.parametrize("thought", [written("f", {}), "<tool_call>no</tool_call>", "I open <tool_call>, and then"])
def test_calls_in_the_reasoning_are_content(thought):
    reasoning = f"<think>{thought}</think>"
    assert parse_tool_calls(f"{reasoning}no") == (f"{reasoning}no", [])
    assert parse_tool_calls(reasoning + written("g", None)) == (reasoning, [ToolCall("g", "{}")])


@pytest.mark.parametrize("text", ["<tool_call>", "<tool_call>[", '<tool_call>{"a":"', "<tool_call>1</tool_call>"])
@pytest.mark.parametrize("times", [900, 50_000])
def test_many_open_calls_take_little_time(text, times):
    answer = text * times + "a" * 500_000
    start = time.process_time()
    assert parse_tool_calls(answer) == (answer, [])
    assert time.process_time() - start < 5
