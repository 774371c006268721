"""An environment whose tools are Python functions."""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from miles.base import strict_json
from miles.base.one_line import name_and_words, one_line
from miles.base.user_code.calls import run_blocking
from miles.base.user_code.errors import UserCodeError
from miles.tasks.environments.base import Environment, Message
from miles.types.sample import Prompt


class ToolEnvironment(Environment):
    """Runs the calls that the model makes, until it answers without one.

    A tool is a function with type hints and a docstring of Google style, from which transformers makes the schema that
    the model sees. It may be ``async``; another one runs in a thread (``run_blocking``). Its result is the content of a
    message of role tool: text as it is, anything else as JSON. An exception becomes such a message too, so the model
    can correct itself.

    Attributes:
        max_turns: Answers of the model, at most (``--max-turns``); the calls of the last one are not run.
        prompt: The row.
        messages: Answers, and what the tools returned, oldest first.
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

    async def call(self, name: str, arguments: str) -> str:
        """Return what a tool returns or raises, as text; ``arguments`` are JSON."""
        function = self._by_name.get(name)
        if function is None:
            return f"error: there is no tool {one_line(name, 80)}; there are {', '.join(self._by_name)}"
        try:
            given = strict_json.loads(arguments)
            inspect.signature(function).bind(**given)
        except (strict_json.StrictJsonError, TypeError) as error:
            return f"error: these are not the arguments of {name}: {one_line(str(error), 200)}"
        try:
            if inspect.iscoroutinefunction(function):
                found = await function(**given)
            else:
                found = await run_blocking(function, **given)
        except (Exception, SystemExit) as error:  # a tool may raise anything for what the model asks
            return said_of(error)
        return content_of(found)


def content_of(found: Any) -> str:
    """Return what a tool has returned as the content of a message: text as it is, anything else as JSON."""
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)


def said_of(error: BaseException) -> str:
    """Return what a tool has raised as the content of a message."""
    raised = error.__cause__ if isinstance(error, UserCodeError) and error.__cause__ is not None else error
    return f"error: {one_line(name_and_words(raised), 400)}"


def opening(prompt: Prompt) -> list[Message]:
    """Return the messages of a row: its prompt as it is, or text as one message of the user."""
    given = prompt.text if prompt.input is None else prompt.input
    return [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
