"""A call of ``POST /v1/chat/completions``: its allowed fields, in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from miles.base import strict_json
from miles.base.one_line import one_line
from miles.rollout.agents.api_error import ApiError

Message = dict[str, Any]  # as chat templates take it: role, content (text), and tool_calls with arguments as objects

ROLES = ("system", "developer", "user", "assistant", "tool")
# The trainer assumes the sampling of the run's flags, so these are read and change nothing.
SAMPLING = ("temperature", "top_p", "seed", "frequency_penalty", "presence_penalty", "logit_bias")
# These change nothing that the model does here.
_UNUSED = {"metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning_effort", "safety_identifier"}
_UNUSED |= {"service_tier", "store", "user", "verbosity"}
_READ = {"max_completion_tokens", "max_tokens", "messages", "model", "n", "response_format", "stop", "stream"}
_READ |= {"logprobs", "stream_options", "tool_choice", "tools"}
MAX_STOPS = 4  # as OpenAI has it


@dataclass(frozen=True)
class ChatRequest:
    """A valid call.

    Attributes:
        messages: The conversation, oldest first.
        tools: The tools that the model is shown; empty for none.
        max_tokens: The most tokens of the answer that the program wants; None for as many as there is room for.
        stop: Texts that end the answer.
        stream: Whether the answer is sent as server-sent events.
        stream_usage: Whether the last event has the numbers of tokens.
        sampling: Names of parameters that differ from what the run samples with, or may.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    sampling: tuple[str, ...] = ()

    @property
    def keys(self) -> list[str]:
        """Return a text per message that is equal for equal messages."""
        return [message_key(message) for message in self.messages]


def message_key(message: Message) -> str:
    """Return a text that is equal for messages that say the same.

    Ids of tool calls, and white space and order in their arguments, do not count: agent programs rewrite them.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return json.dumps([message["role"], message["content"], calls], sort_keys=True)


def read_request(text: str) -> ChatRequest:
    """Return the call that ``text`` holds as JSON.

    Raises:
        ApiError: It is malformed, or asks for something that a recorded answer cannot have.
    """
    try:
        body = strict_json.loads(text)
    except strict_json.StrictJsonError as error:
        raise ApiError(f"the body is {error}") from error
    if not isinstance(body, dict):
        raise ApiError("the body is not a JSON object")
    body = {name: value for name, value in body.items() if value is not None}  # null is OpenAI's "not given"
    for name in body:
        if name not in _UNUSED | _READ | set(SAMPLING):
            raise ApiError(f"the parameter {one_line(name, 80)} is not known here; leave it out", param=name)
    _refuse_what_is_not_offered(body)
    streams = _read(body, "stream", bool, False)
    options = _read(body, "stream_options", dict, {})
    tools = _read(body, "tools", list, [])
    hidden = body.get("tool_choice") == "none"
    return ChatRequest(
        messages=_messages(body),
        tools=() if hidden else tuple(_tool(tool, number) for number, tool in enumerate(tools)),
        max_tokens=_max_tokens(body),
        stop=_stop(body),
        stream=streams,
        stream_usage=bool(options.get("include_usage")),
        sampling=tuple(name for name in SAMPLING if name in body),
    )


def _refuse_what_is_not_offered(body: dict[str, Any]) -> None:
    offered: dict[str, tuple[Any, ...]] = {
        "n": (1,),
        "logprobs": (False,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto", "none"),
    }
    for name, values in offered.items():
        if name in body and body[name] not in values:
            accepted = " or ".join(json.dumps(value) for value in values)
            given = one_line(json.dumps(body[name]), 80)
            raise ApiError(f"{name} {given}: must be {accepted}; leave it out", param=name)


def _read(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(f"{name} is of type {type(value).__name__}; give {kind.__name__}", param=name)
    return value


def _max_tokens(body: dict[str, Any]) -> int | None:
    limits = [_read(body, name, int, None) for name in ("max_completion_tokens", "max_tokens") if name in body]
    for limit in limits:
        if limit < 1:
            raise ApiError(f"max_completion_tokens {limit}: must be at least 1", param="max_completion_tokens")
    return min(limits, default=None)


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    given = body.get("stop", [])
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop must be a text, or a list of at most {MAX_STOPS} texts, none of them empty", param="stop")
    return tuple(stops)


def _tool(tool: Any, number: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f'tools[{number}]: give {{"type": "function", "function": {{"name": …}}}}', param="tools")
    kept: dict[str, Any] = tool
    return kept


def _messages(body: dict[str, Any]) -> tuple[Message, ...]:
    given = _read(body, "messages", list, [])
    if not given:
        raise ApiError("messages is empty; give one message at least", param="messages")
    return read_messages(given)


def read_messages(given: Sequence[Any]) -> tuple[Message, ...]:
    """Return messages of OpenAI's API in the form that chat templates take; raise ``ApiError`` for a malformed one."""
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise ApiError(f"{where}: give an object whose role is one of {', '.join(ROLES)}", param="messages")
    message: Message = {"role": given["role"], "content": _content(given.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    calls = given.get("tool_calls")
    if calls:
        if given["role"] != "assistant" or not isinstance(calls, list):
            raise ApiError(f"{where}: tool_calls is a list, and the assistant's", param="messages")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: its content must be text, or parts of type text", param="messages")
    return "".join(text for text in texts if text is not None)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}: a tool call has no function with a name", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # templates take an object, and write text as text in quotes
        with suppress(strict_json.StrictJsonError):  # as the model wrote it; the template writes it as text
            arguments = strict_json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
