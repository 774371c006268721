"""From the messages of a call to tokens, through the model's chat template, also behind tokens that were sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from miles.base.input_error import InputError
from miles.base.one_line import one_line
from miles.engine.base import Generation
from miles.rollout.agents.api_error import ApiError
from miles.rollout.agents.chat_request import Message
from miles.rollout.answer_text import answer_text
from miles.tasks.data.row import Row
from miles.tasks.data.special_tokens import SpecialTokens
from miles.tasks.data.tokenizer import turn_arguments

_MARK = "theanswerthatwassampled"
_ROW = Row("the messages", {})  # for errors in special tokens


class ChatFormat:
    """Renders conversations and tokenizes them. Text of special tokens inside messages is read as text."""

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        self._special = SpecialTokens(tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> list[int]:
        """Return the tokens of a whole conversation, up to the start of the assistant's next turn.

        Raises:
            ApiError: The template refuses the messages.
        """
        rendered, hidden = self._render(messages, tools)
        return self._token_ids(rendered, hidden)

    def continuation(
        self, messages: Sequence[Message], answered: int, tools: Sequence[dict[str, Any]], last_token: int
    ) -> list[int] | None:
        """Return the tokens between an answer, which ends ``messages[:answered]``, and the next turn to be sampled.

        They are the end of the answer's turn, as far as it was not sampled, the messages behind it and the start of
        the assistant's next turn. A mark is rendered in the place of the answer, so they do not depend on how the
        template would write the answer itself.

        Args:
            messages: The whole conversation.
            answered: How many messages the sampled tokens cover.
            tools: The tools of the call.
            last_token: The last sampled token. If the end of the turn begins with it, it is not repeated.

        Returns:
            None if the template does not write the answer exactly once, so that there is nothing to continue.

        Raises:
            ApiError: The template refuses the messages.
        """
        mark = _MARK
        while mark in json.dumps(messages):
            mark += "x"
        marked = [*messages[: answered - 1], {"role": "assistant", "content": mark}, *messages[answered:]]
        rendered, hidden = self._render(marked, tools)
        if rendered.count(mark) != 1:
            return None
        token_ids = self._token_ids(rendered.partition(mark)[2], hidden)
        return token_ids[1:] if token_ids[:1] == [last_token] else token_ids

    def text(self, generation: Generation, stop_texts: Sequence[str] = ()) -> str:
        """Return the text of an answer, as ``answer_text`` does."""
        ended, mask = generation.finish_reason == "stop", [1] * len(generation.token_ids)
        return answer_text(self.tokenizer, generation.token_ids, mask, ended, stop_texts)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[str, dict[str, str] | None]:
        """Return the text, and the special tokens that are hidden in it; None if there are none in the messages."""
        given, hidden = [*messages, {"role": "tools", "tools": list(tools)}], None
        if self._special.are_in(given):
            given, hidden = self._special.hide(given)
        *shown, last = given
        with_tools = {"tools": last["tools"]} if last["tools"] else {}
        try:
            rendered = self.tokenizer.apply_chat_template(
                shown, tokenize=False, **turn_arguments(self._kwargs, shown), **with_tools
            )
        except Exception as error:  # templates are the model author's code and may raise anything
            reason = one_line(str(error), 300)
            raise ApiError(
                f"the model's chat template refuses the messages ({type(error).__name__}: {reason})", param="messages"
            ) from error
        return str(rendered), hidden

    def _token_ids(self, text: str, hidden: dict[str, str] | None) -> list[int]:
        if hidden is not None:
            try:
                return list(self._special.token_ids(_ROW, text, hidden))
            except InputError as error:
                raise ApiError(str(error), param="messages") from error
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []
