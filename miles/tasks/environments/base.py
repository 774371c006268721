"""The protocol of an environment: reset, step, tools, reward."""

import ast
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Protocol

from miles.base import strict_json
from miles.base.choices import Choice
from miles.base.text import InputError, name_and_words, one_line
from miles.base.user_code import UserCodeError, run_blocking
from miles.types.sample import IMAGE_PLACEHOLDER, Prompt, data_uri

Message = Mapping[str, Any]  # as in OpenAI's chat API: role, content, tool_calls, tool_call_id


class ConversationTooLong(Exception):
    """The messages leave no room for an answer (``--rollout-max-context-len``, ``--rollout-max-response-len``)."""


class Model(Protocol):
    """The model of one trajectory. Its answers are recorded token by token and trained on.

    Attributes:
        url: The base URL at which the same model answers calls of OpenAI's chat API.
    """

    url: str

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the model's answer to a conversation, a message of role assistant, of ``max_tokens`` tokens at most.

        Raises:
            ConversationTooLong: There is no room for an answer.
        """

    def accept(self, session_id: str) -> None:
        """Take calls at ``url`` whose header ``X-Session-ID`` is ``session_id`` as calls of this trajectory."""


class Environment(ABC):
    """One trajectory: an object is made for it and used once. All methods run in the rollout process's event loop.

    Attributes:
        needs_url: Whether the environment calls the model at ``Model.url``.
        max_tokens: The tokens of one answer, at most; None for as many as there is room for.
        max_turns: Answers of the model, at most; None for any number. ``--max-turns`` sets it.
    """

    needs_url: ClassVar[bool] = False
    max_tokens: ClassVar[int | None] = None
    max_turns: int | None = None

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the chat template shows to the model, in the form of OpenAI's API; read in every turn."""
        return ()

    @abstractmethod
    async def reset(self) -> Sequence[Message]:
        """Return the messages that begin the conversation."""

    @abstractmethod
    async def step(self, answer: Message) -> Sequence[Message]:
        """Return the messages that follow the model's answer; none end the trajectory."""

    @abstractmethod
    async def reward(self) -> float:
        """Return the reward of the trajectory, also of one that was cut because it had become too long."""

    async def play(self, model: Model) -> float:
        """Take the trajectory to its end, and return its reward.

        An environment that has a separate loop, such as one of a library, overrides this. The model does not read the
        reply of ``step`` to the last of ``max_turns`` answers.
        """
        messages = list(await self.reset())
        with suppress(ConversationTooLong):  # the trajectory ends there, truncated
            for turn in count(1):
                answer = await model.answer(messages, self.tools, self.max_tokens)
                reply = await self.step(answer)
                if not reply or turn == self.max_turns:
                    break
                messages += [answer, *reply]
        return await self.reward()


EnvironmentMaker = Callable[[Prompt], Environment]  # called once per trajectory, with its row


class EnvironmentKind(Choice[None]):
    """Environments that ``--environment`` names: one file each in ``built_in/``, found by its name.

    Attributes:
        options: The settings that may follow the name, each with its default.
        imports: The options that are import paths, each with the kind of object that it names.
        has_reward: Whether it gives a reward, for ``--rm-type environment``.
        bounds_turns: Whether it reads ``max_turns``.
        libraries: Modules that a plain install lacks, each as ``module with pip install NAME``.
    """

    flag = "environment"
    options: ClassVar[Mapping[str, Any]] = {}
    imports: ClassVar[Mapping[str, str]] = {}
    has_reward: ClassVar[bool] = True
    bounds_turns: ClassVar[bool] = True
    libraries: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def maker(self, options: Mapping[str, Any]) -> EnvironmentMaker:
        """Return the maker of a run's environments. If it has an async method ``close``, that is called at the end.

        Raises:
            InputError: An option has a value that it cannot have.
        """


# Settings after a name: ``key=value,…``.


def read_options(text: str, origin: str) -> dict[str, Any]:
    """Return the settings in ``text``; values are numbers, lists and the like of Python, true, false, or bare text.

    Raises:
        InputError: A part is not ``key=value``, or a key is there twice. The message begins with ``origin``.

    >>> read_options("size=10,split=test", "--prompt-data x")
    {'size': 10, 'split': 'test'}
    """
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise InputError(f"{origin}: {one_line(pair, 100)!r} is not key=value; write size=1000,seed=1")
        if key in options:
            raise InputError(f"{origin}: {one_line(key, 100)!r} is given twice; keep one of them")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text  # a bare word is text


# An environment whose tools are Python functions.


class ToolEnvironment(Environment):
    """Runs the calls that the model makes, until it answers without one.

    A tool is a function with type hints and a docstring of Google style; transformers makes the schema that the model
    sees from them. It may be ``async``; another one runs in a thread (``run_blocking``). Its result is the content of a
    message of role tool: text unchanged, and so a list of parts ``{"type": "text", "text": …}`` and ``{"type": "image",
    "image": …}``; anything else as JSON. An exception becomes such a message too, so the model can correct itself.

    Attributes:
        max_turns: Answers of the model, at most (``--max-turns``); the calls of the last one are not run.
        prompt: The row.
        messages: Answers and the results of tools, oldest first.
    """

    max_turns: int | None = 8

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = []

    @abstractmethod
    def functions(self) -> Sequence[Callable[..., Any]]:
        """Return the tools. They may be methods, and share the state of this trajectory."""

    @cached_property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Their schemas."""
        from transformers.utils.chat_template_utils import get_json_schema

        return [get_json_schema(function) for function in self.functions()]

    @cached_property
    def _by_name(self) -> dict[str, Callable[..., Any]]:
        return {schema["function"]["name"]: f for schema, f in zip(self.tools, self.functions(), strict=True)}

    @property
    def answer(self) -> str:
        """The content of the last answer."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        return str(answers[-1]["content"] or "") if answers else ""

    async def reset(self) -> Sequence[Message]:
        """Return the prompt of the row."""
        return opening(self.prompt)

    async def step(self, answer: Message) -> Sequence[Message]:
        """Run the calls of an answer, one after another."""
        self.messages.append(answer)
        turns = sum(message["role"] == "assistant" for message in self.messages)
        calls = answer.get("tool_calls") or ()
        if self.max_turns is not None and turns >= self.max_turns:
            return ()
        replies = [
            {"role": "tool", "tool_call_id": call["id"], "content": await self.call(**call["function"])}
            for call in calls
        ]
        self.messages += replies
        return replies

    async def call(self, name: str, arguments: str) -> str | list[dict[str, Any]]:
        """Return the result or error of a tool, as text or parts; ``arguments`` are JSON."""
        function = self._by_name.get(name)
        if function is None:
            return f"error: there is no tool {one_line(name, 80)}; there are {', '.join(self._by_name)}"
        try:
            values = strict_json.loads(arguments)
            inspect.signature(function).bind(**values)
        except (strict_json.StrictJsonError, TypeError) as error:
            return f"error: these are not the arguments of {name}: {one_line(str(error), 200)}"
        return await content_of_call(function, **values)


async def content_of_call(function: Callable[..., Any], /, *args: Any, **named: Any) -> str | list[dict[str, Any]]:
    """Call a tool, and return its result or error as the content of a message.

    Text and parts are unchanged, anything else is JSON. A function that is not ``async`` runs in a thread.
    """
    try:
        if inspect.iscoroutinefunction(function):
            result = await function(*args, **named)
        else:
            result = await run_blocking(function, *args, **named)
        if isinstance(result, str) or (isinstance(result, list) and result and all(map(_is_part, result))):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)
    except (Exception, SystemExit) as error:  # a tool may raise anything on the model's arguments
        raised = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
        return f"error: {one_line(name_and_words(raised), 400)}"


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", "image", "image_url")


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages of a row: its prompt unchanged, or text as one message of the user; with their images."""
    content = prompt.text if prompt.input is None else prompt.input
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
    return messages if prompt.images is None else _with_files(messages, prompt.images.files)


def _with_files(messages: Sequence[Message], files: Sequence[bytes]) -> list[Message]:
    """Return messages whose images are data: URIs, as in OpenAI's API. Text may have placeholders of a column."""
    contents = [message["content"] for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    fills_text = sum(part["type"] != "text" for part in parts) < len(files)
    left = iter(files)
    filled: list[Message] = []
    for message, content in zip(messages, contents, strict=True):
        if isinstance(content, str) and fills_text:
            texts = re.split(f"({IMAGE_PLACEHOLDER})", content)
            content = [{"type": "image"} if t == IMAGE_PLACEHOLDER else {"type": "text", "text": t} for t in texts if t]
        if isinstance(content, list):
            content = [part if part["type"] == "text" else _as_uri(next(left)) for part in content]
        filled.append({**message, "content": content})
    return filled


def _as_uri(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri("image", file)}}
