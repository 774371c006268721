"""Chat completions, as agent programs call them: errors, tool calls in answers, requests, and messages as tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles.base import strict_json
from miles.base.text import InputError, one_line
from miles.engine.base import Generation
from miles.rollout.groups import answer_text
from miles.tasks.data.row import Row
from miles.tasks.data.settings import DataArguments
from miles.tasks.data.tokenizer import SpecialTokens, files_of, turn_arguments
from miles.tasks.rewards.answer_text import END_OF_REASONING

if TYPE_CHECKING:
    from miles.tasks.data.images import ImageReader
    from miles.types.images import PromptImages

OUT_OF_ROOM = "context_length_exceeded"  # OpenAI's code; it tells agent programs that they must shorten


class ApiError(Exception):
    """Describe the fault of a call.

    Attributes:
        status: The status of the HTTP response.
        param: The field of the call that is wrong.
        code: OpenAI's short name of the fault, if it has one.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


# Tool calls in the text of a model, in the form of Hermes and Qwen: ``<tool_call>{json}</tool_call>``.


_OPEN, _CLOSE = re.compile(r"<tool_call>\s*"), re.compile(r"\s*</tool_call>")
_DECODER = json.JSONDecoder()
MOST_CALLS = 1000  # in an answer; each takes time linear in the answer's length


@dataclass(frozen=True)
class ToolCall:
    """A call that the model makes. ``arguments`` is JSON, as OpenAI's API has it."""

    name: str
    arguments: str


def parse_tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text outside the tool calls, and the calls in order.

    What the model writes before the end of its reasoning is content. If a block behind that is not a call, nothing is:
    the whole text is content, so that the program sees the model's output.

    >>> parse_tool_calls('Let me see.<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ('Let me see.', [ToolCall(name='add', arguments='{"a": 1}')])
    >>> parse_tool_calls("<tool_call>add 1</tool_call>")
    ('<tool_call>add 1</tool_call>', [])
    """
    blocks = list(_blocks(text)) if text.count("<tool_call>") <= MOST_CALLS else []
    reasoned = _outside(text, [block for block in blocks if block[2] is not None], " ").rfind(END_OF_REASONING)
    blocks = [block for block in blocks if block[0] > reasoned]
    calls = [call for _, _, call in blocks if call is not None]
    if not calls or len(calls) < len(blocks):
        return text, []
    return _outside(text, blocks).strip(), calls


def _outside(text: str, blocks: Sequence[tuple[int, int, Any]], filler: str = "") -> str:
    """Return ``text`` with ``filler`` for each character of the blocks."""
    result, last = "", 0
    for start, end, _ in blocks:
        result += text[last:start] + filler * (end - start)
        last = end
    return result + text[last:]


def _blocks(text: str) -> Iterator[tuple[int, int, ToolCall | None]]:
    """Yield where each block begins and ends, and its call; None if it is closed and not a call."""
    position = 0
    last_close = text.rfind("</tool_call>")
    while begins := _OPEN.search(text, position):
        position = begins.end()
        call = None
        with suppress(ValueError, RecursionError):
            _, end = _DECODER.raw_decode(text, position)
            if closes := _CLOSE.match(text, end):
                call = _call(text[position:end])
                position = closes.end()
        if call is not None or last_close >= position:
            yield begins.start(), position, call


def _call(block: str) -> ToolCall | None:
    try:
        value: Any = strict_json.loads(block)
    except strict_json.StrictJsonError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return ToolCall(value["name"], arguments if arguments.strip() else "{}")
    arguments = {} if arguments is None else arguments
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


# A call of ``POST /v1/chat/completions``: its allowed fields, in the form that a chat template takes.


Message = dict[str, Any]  # as chat templates take it: role, content (text), and tool_calls with arguments as objects

IMAGES = ("image", "image_url")  # types of a part of a message
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
        sampling: Names of parameters that differ, or may differ, from the run's sampling.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    sampling: tuple[str, ...] = ()


def message_key(message: Message) -> str:
    """Return a text that is equal for messages that say the same.

    Ids of tool calls, and white space and order in their arguments, do not count: agent programs rewrite them.
    """
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return _as_json([message["role"], message["content"], calls])


def _as_json(value: Any) -> str:
    """Return the JSON of messages, with a digest of each image's file."""
    return json.dumps(value, sort_keys=True, default=lambda image: image.digest)


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
    options = _read(body, "stream_options", dict, {})
    tools = _read(body, "tools", list, [])
    messages = _read(body, "messages", list, [])
    if not messages:
        raise ApiError("messages is empty; give one message at least", param="messages")
    limits = [_read(body, name, int, None) for name in ("max_completion_tokens", "max_tokens") if name in body]
    for limit in limits:
        if limit < 1:
            raise ApiError(f"max_completion_tokens {limit}: must be at least 1", param="max_completion_tokens")
    hidden = body.get("tool_choice") == "none"
    return ChatRequest(
        messages=read_messages(messages),
        tools=() if hidden else tuple(_tool(tool, number) for number, tool in enumerate(tools)),
        max_tokens=min(limits, default=None),
        stop=_stop(body),
        stream=_read(body, "stream", bool, False),
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
            text = one_line(json.dumps(body[name]), 80)
            raise ApiError(f"{name} {text}: must be {accepted}; leave it out", param=name)


def _read(body: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ApiError(f"{name} is of type {type(value).__name__}; give {kind.__name__}", param=name)
    return value


def _stop(body: dict[str, Any]) -> tuple[str, ...]:
    value = body.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop must be a text, or a list of at most {MAX_STOPS} texts, none of them empty", param="stop")
    return tuple(stops)


def _tool(tool: Any, number: int) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f'tools[{number}]: give {{"type": "function", "function": {{"name": …}}}}', param="tools")
    result: dict[str, Any] = tool
    return result


def read_messages(messages: Sequence[Any]) -> tuple[Message, ...]:
    """Return messages of OpenAI's API in the form that chat templates take; raise ``ApiError`` for a malformed one."""
    return tuple(_message(message, f"messages[{number}]") for number, message in enumerate(messages))


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict) or entry.get("role") not in ROLES:
        raise ApiError(f"{where}: give an object whose role is one of {', '.join(ROLES)}", param="messages")
    message: Message = {"role": entry["role"], "content": _content(entry.get("content"), where)}
    for name in ("name", "tool_call_id"):
        if isinstance(entry.get(name), str):
            message[name] = entry[name]
    calls = entry.get("tool_calls")
    if calls:
        if entry["role"] != "assistant" or not isinstance(calls, list):
            raise ApiError(f"{where}: tool_calls is a list, and the assistant's", param="messages")
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _content(content: Any, where: str) -> Any:
    """Return text; with images, the parts, which ``ChatFormat.with_images`` reads."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    texts = [part.get("text") for part, kind in zip(parts, kinds, strict=True) if kind == "text"]
    if not all(kind in ("text", *IMAGES) for kind in kinds) or not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}: its content must be text, or parts of type text or image", param="messages")
    return "".join(texts) if len(texts) == len(parts) else parts


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"{where}: a tool call has no function with a name", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # templates take an object, and write text in quotes
        with suppress(strict_json.StrictJsonError):  # what is not JSON stays text, as the model wrote it
            arguments = strict_json.loads(arguments)
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


# From the messages of a call to tokens, through the model's chat template, also after tokens that were sampled.


_MARK = "theanswerthatwassampled"
_ROW = Row("the messages", {})  # for errors in special tokens


@contextmanager
def _as_api_error() -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise ApiError(str(error), param="messages") from error


class ChatFormat:
    """Renders conversations and tokenizes them. Text of special tokens inside messages is read as text."""

    def __init__(
        self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None, data: DataArguments | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        self._data = data or DataArguments()
        self._special = SpecialTokens(tokenizer)

    @cached_property
    def _images(self) -> ImageReader:
        from miles.tasks.data.images import ImageReader

        # Each part of a message has its image, so no column has them.
        reader = ImageReader.of_model(replace(self._data, multimodal_keys=None), self.tokenizer.name_or_path)
        if reader is None:
            raise ApiError("the model reads no images; give text", param="messages")
        return reader

    def with_images(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages with the files of their images.

        Raises:
            ApiError: An image cannot be read, or the model reads none.
        """
        if all(isinstance(message["content"], str) for message in messages):
            return tuple(messages)
        with _as_api_error():
            return tuple(self._images.messages(replace(_ROW, files={}), messages))

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[int], PromptImages | None]:
        """Return the tokens of a whole conversation, up to the start of the assistant's next turn, and its images.

        Raises:
            ApiError: The template refuses the messages.
        """
        return self._read(messages, *self._render(messages, tools))

    def continuation(
        self,
        messages: Sequence[Message],
        answered: int,
        tools: Sequence[dict[str, Any]],
        known: Sequence[int],
        images: PromptImages | None,
    ) -> tuple[list[int], PromptImages | None] | None:
        """Return the tokens between an answer, which ends ``messages[:answered]``, and the next turn to be sampled.

        They are the end of the answer's turn, as far as it was not sampled, the messages after it and the start of the
        assistant's next turn. A mark is rendered instead of the answer, so they do not depend on how the template would
        write the answer itself.

        Args:
            messages: The whole conversation.
            answered: How many messages the sampled tokens cover.
            tools: The tools of the call.
            known: The tokens through the answer. If the end of the turn begins with the last one, it is not repeated.
            images: The images in them.

        Returns:
            The tokens, and all images. None if the template does not write the answer exactly once, so that there is
            nothing to continue.

        Raises:
            ApiError: The template refuses the messages.
        """
        mark = _MARK
        while mark in _as_json(messages):
            mark += "x"
        marked = [*messages[: answered - 1], {"role": "assistant", "content": mark}, *messages[answered:]]
        rendered, hidden = self._render(marked, tools)
        if rendered.count(mark) != 1:
            return None
        token_ids, later = self._read(messages[answered:], rendered.partition(mark)[2], hidden, images)
        is_repeated = token_ids[:1] == [known[-1]]
        if later is not None:
            images = later.after(images, len(known) - is_repeated)
        return token_ids[is_repeated:], images

    def text(self, generation: Generation, stop_texts: Sequence[str] = ()) -> str:
        """Return the text of an answer, as ``answer_text`` does."""
        mask = [1] * len(generation.token_ids)
        ended = generation.finish_reason == "stop"
        return answer_text(self.tokenizer, generation.token_ids, mask, ended, stop_texts)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, dict[str, str] | None]:
        """Return the text, and the special tokens that are hidden in it; None if there are none in the messages."""
        entries = [*messages, {"role": "tools", "tools": list(tools)}]
        hidden = None
        if self._special.are_in(entries):
            entries, hidden = self._special.hide(entries)
        *turns, last = entries
        arguments = turn_arguments(self._kwargs, turns) | ({"tools": last["tools"]} if last["tools"] else {})
        if not all(isinstance(message["content"], str) for message in turns) and self._images.template is not None:
            arguments.setdefault("chat_template", self._images.template)
        try:
            rendered = self.tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
        except Exception as error:  # templates are the model author's code and may raise anything
            reason = one_line(str(error), 300)
            raise ApiError(
                f"the model's chat template refuses the messages ({type(error).__name__}: {reason})", param="messages"
            ) from error
        return str(rendered), hidden

    def _read(
        self,
        messages: Sequence[Message],
        text: str,
        hidden: dict[str, str] | None,
        before: PromptImages | None = None,
    ) -> tuple[list[int], PromptImages | None]:
        """Return the tokens of rendered messages, and their images."""
        if all(isinstance(message["content"], str) for message in messages):
            return self._token_ids(text, hidden), None
        files = files_of(messages)
        with _as_api_error():
            token_ids = self._token_ids(self._images.expand(_ROW, text, files, before), hidden)
            return token_ids, self._images.prompt_images(_ROW, files, token_ids, before)

    def _token_ids(self, text: str, hidden: dict[str, str] | None) -> list[int]:
        if hidden is not None:
            with _as_api_error():
                return list(self._special.token_ids(_ROW, text, hidden))
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
