"""Load conversations for fine-tuning, and find the tokens of the roles that are trained."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from miles.base.flags import FlagError
from miles.base.text import InputError
from miles.base.tokenizer import end_of_turn, load_tokenizer, next_added_token
from miles.tasks.data.checked_rows import PromptSet, caught, check_rows, name_of, verdict_key
from miles.tasks.data.row import Notes, Row
from miles.tasks.data.settings import DataArguments, of_rows
from miles.tasks.data.sources import open_rows
from miles.tasks.data.tokenizer import PromptRenderer, written_text
from miles.types.sample import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)
Render = Callable[[Sequence[dict[str, Any]], bool], str]  # of messages, and whether the assistant's turn is opened
_MARK = "contentofthismessage"  # replaces a content, to see the template's text after it
_LIMITS = "--rollout-max-context-len, --rollout-max-response-len or --rollout-max-prompt-len"
_NO_END = "the chat template writes no token that ends the turn of a trained message, so none is trained on"
_LEFT_OUT = "the chat template leaves out a part of a trained message, so that this part is not trained on"
_NO_OBJECT = "the metadata, column --metadata-key, is no object, and is left out"


@dataclass(frozen=True)
class Conversation(Prompt):
    """A conversation as a model is trained on it: as a prompt, it is the part before the first trained token.

    Attributes:
        response_ids: The tokens from there to the last trained one.
        loss_mask: 1 for each of them that is trained on, 0 for tokens of other roles and of the template.
        response: Their text.
    """

    response_ids: tuple[int, ...] = ()
    loss_mask: tuple[int, ...] = ()
    response: str = ""

    @property
    def prompt(self) -> Prompt:
        """The prompt alone."""
        return Prompt(self.text, self.token_ids, metadata=self.metadata, source=self.source, images=self.images)


def load_conversations(
    source: str,
    data: DataArguments,
    tokenizer: PreTrainedTokenizerBase | str,
    *,
    max_response_len: int | None = None,
    max_context_len: int | None = None,
) -> PromptSet[Conversation]:
    """Check the conversations of ``source``: each is rendered through the chat template, here and when it is drawn.

    The column ``--input-key`` is a list of messages, as of a chat. Messages of ``--sft-roles`` are trained on: their
    content, and the template's tokens at the end of their turn, or the next role's token. A conversation that has more
    tokens than a limit is dropped, and their number is logged.

    Args:
        source: One of ``SOURCES`` (settings.py).
        data: Names of the columns, and the roles.
        tokenizer: The model's tokenizer, with a chat template; or its folder or name, as for ``load_prompts``.
        max_response_len: The most tokens from the first trained one on.
        max_context_len: The most tokens of a conversation.

    Raises:
        FlagError: For malformed rows, a template that changes the messages it renders, and a set without a row to
            train on.
    """
    reader = _Reader(data, tokenizer)
    rows = open_rows(source)
    limits = tuple(
        math.inf if limit is None else limit
        for limit in (max_context_len, max_response_len, data.rollout_max_prompt_len)
    )

    def is_long(conversation: Conversation) -> bool:
        prompt, response = len(conversation.token_ids), len(conversation.response_ids)
        return any(length > limit for length, limit in zip((prompt + response, response, prompt), limits, strict=True))

    key = verdict_key(source, rows, name_of(tokenizer), "conversations", of_rows(data), limits)
    verdict = check_rows(source, rows, reader.conversations, is_long, key)
    if not verdict.usable:
        raise FlagError(
            f"prompt source {source}: all {verdict.rows} conversations are longer than a limit; give a longer limit, "
            "or one with at least one row"
        )
    verdict.notes.log(source, verdict.rows)
    if verdict.dropped:
        _logger.warning(
            "%s: %d of %d conversations: dropped, because it is longer than %s; the first is %s",
            source,
            verdict.dropped,
            verdict.rows,
            _LIMITS,
            verdict.first_long,
        )

    def unrendered(row: Row) -> Prompt:
        return Prompt("", (), input=row.find(data.input_key))

    return PromptSet(rows, verdict, reader.conversation, unrendered, _LIMITS)


class _Reader:
    """Makes conversations of rows. The tokenizer is loaded when the first is made."""

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase | str) -> None:
        self._data, self._source = data, tokenizer

    @cached_property
    def _tools(self) -> tuple[PromptRenderer, PreTrainedTokenizerBase]:
        tokenizer = load_tokenizer(self._source) if isinstance(self._source, str) else self._source
        if not tokenizer.is_fast:
            raise InputError(
                "--loss-type sft_loss: the tokenizer of --hf-checkpoint cannot say which text a token stands for, as "
                "it is no fast one; give a folder with a tokenizer.json"
            )
        return PromptRenderer(replace(self._data, apply_chat_template=True), tokenizer), tokenizer

    def conversation(self, row: Row) -> Conversation:
        """Return the conversation of a row; raise ``InputError`` if it is malformed."""
        renderer, tokenizer = self._tools
        return _read(row, renderer, self._data, tokenizer, Notes())

    def conversations(
        self, rows: Sequence[Row], notes: Notes, is_exact: bool = True
    ) -> list[Conversation | InputError]:
        """Return the conversations of rows; instead of one, the fault of its row."""
        renderer, tokenizer = self._tools
        return [caught(partial(_read, row, renderer, self._data, tokenizer, notes)) for row in rows]


def _joined(message: Any, data: DataArguments) -> Any:
    """Return a message that is trained on with one text instead of parts, if all of these are texts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or message.get("role") not in data.sft_roles:
        return message
    parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
    return message | {"content": "".join(texts)} if len(texts) == len(content) else message


def _read(
    row: Row, renderer: PromptRenderer, data: DataArguments, tokenizer: PreTrainedTokenizerBase, notes: Notes
) -> Conversation:
    messages = row.column(data.input_key, "--input-key")
    if not isinstance(messages, list):
        row.refuse("--loss-type sft_loss trains on a list of chat messages; give one, with the roles and the contents")
    messages = [_joined(message, data) for message in renderer.with_images(row, messages)]
    text = renderer.render_conversation(row, messages)
    rendered = {(tuple(map(written_text, messages)), False): text}

    def render(part: Sequence[dict[str, Any]], opens_turn: bool) -> str:
        key = tuple(map(written_text, part)), opens_turn  # all parts are a beginning of the conversation, or all of it
        if key not in rendered:
            rendered[key] = renderer.render_conversation(row, part, opens_turn)
        return rendered[key]

    spans: list[tuple[int, int]] = []
    has_ends = is_whole = True
    for number, message in enumerate(messages):
        if message["role"] in data.sft_roles:
            if isinstance(message.get("content"), list):
                row.refuse(f"message {number + 1}: is trained on and has an image; write its text alone")
            start, end = _span(row, render, messages, number, renderer.common_prefix)
            is_whole &= _is_written(message, text[spans[-1][1] if spans else 0 : end])
            if not renderer.ends_turn(text[start:end], message):
                ending = next_added_token(tokenizer, text, end)  # the next role's token ends the turn
                if number + 1 == len(messages) and message["role"] == "assistant":
                    ending = end_of_turn(tokenizer)
                    text = text[:end] + ending
                has_ends &= bool(ending)
                end += len(ending)
            spans.append((start, end))
    if not has_ends:
        notes.add(_NO_END, row.where)
    if not is_whole:
        notes.add(_LEFT_OUT, row.where)
    if not spans:
        row.refuse(f"no message has a role of --sft-roles {' '.join(data.sft_roles)}; correct or remove the row")
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    token_ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    # A token that begins inside a span is trained on; one without characters belongs to nothing.
    mask = [int(a < b and any(start <= a < end for start, end in spans)) for a, b in offsets]
    if 1 not in mask:
        row.refuse("the tokens of its trained messages are empty; correct or remove the row")
    first, last = mask.index(1), len(mask) - mask[::-1].index(1)
    if first == 0:
        row.refuse("the first token is trained on, and nothing predicts it; put a message before it")
    metadata = row.find(data.metadata_key)
    if metadata is not None and not isinstance(metadata, dict):
        notes.add(_NO_OBJECT, row.where)
    return Conversation(
        text[: offsets[first][0]],
        tuple(token_ids[:first]),
        metadata=metadata if isinstance(metadata, dict) else {},
        source=row.where,
        images=renderer.images_of(row, messages, token_ids[:last]),
        response_ids=tuple(token_ids[first:last]),
        loss_mask=tuple(mask[first:last]),
        response=text[offsets[first][0] : offsets[last - 1][1]],
    )


def _span(
    row: Row, render: Render, messages: Sequence[dict[str, Any]], number: int, common_prefix: Callable[[str, str], int]
) -> tuple[int, int]:
    """Return the span of the message at ``number`` in the conversation's text: its content and the end of its turn.

    The messages before it, rendered alone, end at its first character; with it, they end at its last one. A template
    may write a turn in another way if it is not the last one (without the reasoning, or with another end), or open it
    in another way than it writes it. Then a mark is rendered instead of the content, and its place is the content's.
    """
    message = messages[number]
    text = render(messages, False)
    opened = render(messages[:number], message["role"] == "assistant") if number else ""
    through = render(messages[: number + 1], False)
    if text.startswith(through) and through.startswith(opened):
        return len(opened), len(through.rstrip())
    content = written_text(message)
    before = common_prefix(render(messages[:number], False), text) if number else 0
    as_opened = common_prefix(opened, text)  # text between header and content belongs to the message
    if text.startswith(through) and as_opened > before and _is_written({"content": content}, through[before:]):
        return as_opened, len(through.rstrip())
    head, tail = _around(render, messages, number)
    last_head, last_tail = _around(render, messages[: number + 1], number)
    if not content.strip():  # a template may put white space between content and calls
        tail, last_tail = tail.lstrip(), last_tail.lstrip()
    start, middle = len(head), len(text) - len(tail)
    end = middle + len(tail[: common_prefix(last_tail, tail)].rstrip())
    is_there = text.startswith(head) and text.endswith(tail) and text[start:middle].strip() == content.strip()
    if start > middle or not is_there or not _is_written(message, text[start:end]):
        row.refuse(
            f"the chat template changes message {number + 1}, so its tokens are not known; shorten the "
            "conversation so that it is the last message, or correct the template"
        )
    return (as_opened if head == last_head and as_opened > before else start), end


def _is_written(message: Mapping[str, Any], text: str) -> bool:
    """Return whether the content and the calls of a message are in ``text``, whatever the white space."""
    calls = [call.get("function", call)["name"] for call in message.get("tool_calls") or ()]
    return "".join(written_text(message).split()) in "".join(text.split()) and all(name in text for name in calls)


def _around(render: Render, messages: Sequence[dict[str, Any]], number: int) -> tuple[str, str]:
    """Return the template's text before and after the content of a message."""
    marked = {**messages[number], "content": _MARK}
    head, _, tail = render((*messages[:number], marked, *messages[number + 1 :]), False).partition(_MARK)
    return head, tail
