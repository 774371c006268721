"""From the prompt of a row to the text and tokens that the model reads: the tokenizer and its chat template."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, TypeAlias

from miles.base import strict_json
from miles.base.flags import FlagError, json_object
from miles.base.text import InputError, one_line
from miles.tasks.data.row import Notes, Row
from miles.tasks.data.settings import DataArguments
from miles.types.sample import IMAGE_PLACEHOLDER

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

    from miles.tasks.data.images import ImageFile, ImageReader
    from miles.types.images import PromptImages

# Text of special tokens inside chat messages, which is read as text.
#
# A tokenizer turns ``<|im_end|>`` anywhere in a text into the token that ends a turn. In a message it is part of what
# somebody wrote: as a token it would end the turn, and the rest could be a turn of any role. Tokens that are
# added but not special, such as ``<think>``, are left alone: templates and models use them inside messages.


_PRIVATE = "\ue000"  # joins no text in a token
_PRIVATE_USE = (0xF0000, 0x100000, 0xE000)  # where code points begin that have no meaning of their own


class SpecialTokens:
    """Finds the special tokens of a tokenizer in text, and tokenizes messages where some of them are text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        names = {name for name, token in added.items() if token.special} | {*tokenizer.all_special_tokens}
        self._names = sorted(names - {""}, key=lambda name: (-len(name), name))
        ids: Any = tokenizer.convert_tokens_to_ids(self._names) if self._names else ()
        self._ids: dict[str, int] = dict(zip(self._names, ids, strict=True))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        patterns = (_with_stripped(name, added.get(name)) for name in self._names)
        self._with_stripped = re.compile("|".join(patterns) or "(?!)")

    def are_in(self, value: Any) -> bool:
        """Return whether a text in ``value`` has the text of a special token."""
        return any(self._pattern.search(text) for text in _texts(value))

    def end(self, text: str) -> bool:
        """Return whether ``text`` ends with a special token."""
        return text.endswith(tuple(self._names))

    def common_prefix(self, one: str, other: str) -> int:
        """Return the length, in characters, of the tokens that two texts begin with in common.

        Only the text between the special tokens around the first difference is tokenized.
        """
        alike = len(commonprefix([one, other]))
        start = max((match.start() for match in self._pattern.finditer(one, 0, alike)), default=0)
        encoded: list[Any] = []
        for text in (one, other):
            matches = self._pattern.finditer(text, start)
            end = next((match.end() for match in matches if match.start() >= alike), len(text))
            encoded.append(self._tokenizer(text[start:end], add_special_tokens=False, return_offsets_mapping=True))
        pairs = zip(*(each["input_ids"] for each in encoded), encoded[0]["offset_mapping"], strict=False)
        spans = [span for _, _, span in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return start + int(spans[-1][1]) if spans else start

    def hide(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Replace the special tokens in messages by single characters that no message has.

        Returns:
            The messages, and the special token of each character.
        """
        used = set("".join(_texts(messages)))
        free = next(
            (base for base in _PRIVATE_USE if not any(chr(base + i) in used for i in range(len(self._names)))), None
        )
        assert free is not None, "a prompt that has characters of all private-use areas"
        characters = {name: chr(free + i) for i, name in enumerate(self._names)}

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self._pattern.sub(lambda match: characters[match[0]], value)
            if isinstance(value, list):
                return [hidden(item) for item in value]
            return {key: hidden(item) for key, item in value.items()} if isinstance(value, dict) else value

        result = [{**hidden(message), "role": message["role"]} for message in messages]
        return result, {character: name for name, character in characters.items()}

    def token_ids(self, row: Row, rendered: str, hidden: dict[str, str]) -> tuple[int, ...]:
        """Tokenize rendered messages: the template's special tokens as such, those that were hidden as text.

        A tokenizer reads the text between two special tokens on its own, so the parts are tokenized one by one.
        """
        ids: list[int] = []
        end = 0
        for match in self._with_stripped.finditer(rendered):
            ids += self._text_ids(row, reveal(rendered[end : match.start()], hidden), end > 0)
            assert match.lastindex is not None, "each name has its group"
            ids.append(self._ids[match[match.lastindex]])
            end = match.end()
        return (*ids, *self._text_ids(row, reveal(rendered[end:], hidden), end > 0))

    @cached_property
    def _marks_the_start(self) -> bool:
        """Whether text at the very start has other tokens than after a special token (Metaspace of scheme "first")."""
        name, id_ = next(iter(self._ids.items()))
        behind: Any = self._tokenizer(name + "x", add_special_tokens=False)["input_ids"]
        alone: Any = self._tokenizer("x", add_special_tokens=False)["input_ids"]
        return bool(self._tokenizer.is_fast) and behind != [id_, *alone]

    def _text_ids(self, row: Row, text: str, is_behind: bool) -> list[int]:
        """Tokenize text without special tokens, which ``is_behind`` a special token or at the start."""
        if not text:
            return []
        before = _PRIVATE if is_behind and self._marks_the_start else ""
        encoded: Any = self._tokenizer(
            before + text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=bool(before)
        )
        ids: list[int] = encoded["input_ids"]
        if before:
            starts = [start for start, _ in encoded["offset_mapping"]]
            if 1 not in starts:
                row.refuse(
                    "this tokenizer cannot read a text behind a special token on its own; remove the special text"
                )
            ids = ids[starts.index(1) :]
        if self.are_in(text) and not set(ids).isdisjoint(self._ids.values()):
            row.refuse("this tokenizer cannot read the text of a special token as text; remove it from the messages")
        return ids


def _with_stripped(name: str, token: AddedToken | None) -> str:
    """Return a pattern of a special token, its group, and of the white space that the tokenizer strips around it."""
    before = r"\s*" if token is not None and token.lstrip else ""
    after = r"\s*" if token is not None and token.rstrip else ""
    return f"{before}({re.escape(name)}){after}"


def reveal(text: str, hidden: dict[str, str]) -> str:
    """Return ``text`` with the parts that ``hide`` replaced."""
    return text.translate({ord(character): name for character, name in hidden.items()})


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return _texts(list(value.values()))
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else []


Tools: TypeAlias = list[dict[str, Any]] | None  # of a row, in the form of OpenAI's API

_CONTINUE = "continue_final_message"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_ASSISTANT_LAST = "the last message is the assistant's, and a new turn of the assistant follows it"
_NOT_CONTINUED = "the last message is not the assistant's, so nothing is continued, and the assistant's turn is opened"
_JSON_TEXT = "the prompt is text that holds a list of messages as JSON, which is read as one message of the user"
_MESSAGES = re.compile(r'\s*\[\s*\{\s*"(?:role|content)"\s*:')
_NO_TOOLS = "the row has tools, and the chat template writes none, so the model does not see them"
_ESCAPED = (
    "a message has the text of a special token, which is read as text (if a template wrote it, drop "
    "--apply-chat-template)"
)
# A template that tells null from an absent key. Arrow, and so Parquet, does not.
_ASKS_FOR_NULL = re.compile(r"\bcontent['\"]?\]?\s*(is|==|!=)\s*(not\s+)?none", re.IGNORECASE)
_NOT_ESCAPED = "the text has a special token, which is read as that token; chat messages are protected from this"


_PRINTABLE = re.compile("[!-~]")


def most_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], float]:
    """Return a function that states how many tokens a text has at most, without tokenizing it; infinite if in doubt.

    A byte-level BPE, as most models have, makes at most one token of a byte, and at least one of printable ASCII that
    is in its vocabulary. NFC makes at most three bytes of one; text of ASCII stays unchanged. Eight tokens may be
    added.
    """
    from tokenizers import models

    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = str(getattr(backend, "pre_tokenizer", ""))
    change = str(getattr(backend, "normalizer", ""))
    if (
        backend is None
        or not isinstance(backend.model, models.BPE)
        or "ByteLevel" not in steps
        or "Removed" in steps
        or change not in ("None", "NFC()")
        or any(backend.token_to_id(each) is None for each in map(chr, range(ord("!"), ord("~") + 1)))
    ):
        return lambda text: math.inf

    def most(text: str) -> float:
        if not _PRINTABLE.search(text):
            return math.inf
        return (len(text) if text.isascii() else 3 * len(text.encode())) + 8

    return most


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a prompt, and the tools of its row, which the text shows.

    ``token_ids`` are there if the tokenizer would read the text as something else; ``images`` are its messages'.
    """

    text: str
    token_ids: tuple[int, ...] | None = None
    tools: Tools = None
    images: PromptImages | None = None


class PromptRenderer:
    """Renders prompts: through the tokenizer's template with ``--apply-chat-template``, otherwise unchanged.

    Raises ``InputError`` if a template is asked for and the tokenizer has none, and if
    ``--apply-chat-template-kwargs`` is not a JSON object or has no template to go to.
    """

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self.uses_template = data.apply_chat_template
        self._data = data
        self._kwargs = json_object("apply_chat_template_kwargs", data.apply_chat_template_kwargs)
        self._tool_key = data.tool_key
        self._tokenizer = tokenizer
        self._special = SpecialTokens(tokenizer)
        self._template = f"{self._kwargs.get('chat_template') or ''}{tokenizer.chat_template or ''}"
        self._asks_for_null = _ASKS_FOR_NULL.search(self._template) is not None
        if self._kwargs and not self.uses_template:
            raise InputError("--apply-chat-template-kwargs: would be ignored; add --apply-chat-template, or drop it")
        if self.uses_template and not self._template:
            raise FlagError(
                "--apply-chat-template: the tokenizer has no chat template; drop the flag, or give a --hf-checkpoint "
                "with a chat template (instruct models have one)"
            )

    def render(self, row: Row, value: Any, notes: Notes) -> RenderedPrompt:
        """Render the prompt ``value`` of ``row``: a string, or a list of ``{"role", "content"}`` messages.

        With the template, a string is one user message, the tools of the row are shown, and the text ends as
        ``turn_arguments`` has it. Special tokens are those that the template writes: their text in a message is text.

        Raises:
            InputError: For an empty or malformed prompt, and for messages without the template; it names the row.
        """
        if not isinstance(value, (str, list)):
            row.refuse(f"the prompt is {_kind(value)}; give text or a list of chat messages")
        if not value or (isinstance(value, str) and not value.strip()):
            row.refuse("the prompt is empty; fill it or remove the row")
        if isinstance(value, list):
            value = self.with_images(row, value)
            self._check_messages(row, value)
        elif self.uses_template:
            if _MESSAGES.match(value):
                notes.add(_JSON_TEXT, row.where)
            value = self.with_images(row, [{"role": "user", "content": value}])
        if self.uses_template:
            is_answer = value[-1]["role"] == "assistant"
            if is_answer and turn_arguments(self._kwargs, value)["add_generation_prompt"]:
                notes.add(_ASSISTANT_LAST, row.where)
            elif not is_answer and self._kwargs.get(_CONTINUE):
                notes.add(_NOT_CONTINUED, row.where)
        tools = self._tools(row) if self.uses_template else None
        if tools and "tools" not in self._template:
            notes.add(_NO_TOOLS, row.where)
        if self._special.are_in([value, tools]):
            if self.uses_template:
                notes.add(_ESCAPED, row.where)
                return self._escaped(row, value, tools)
            notes.add(_NOT_ESCAPED, row.where)
        if not self.uses_template:
            return RenderedPrompt(value, tools=tools)
        text = self._apply(row, value, tools)
        if not _has_images(value):
            return RenderedPrompt(text, tools=tools)
        return self._with_tokens(row, value, text, tools, {})

    @cached_property
    def _images(self) -> ImageReader | None:
        from miles.tasks.data.images import ImageReader

        return ImageReader.of_model(self._data, self._tokenizer.name_or_path)

    def with_images(self, row: Row, messages: list[Any]) -> list[Any]:
        """Return messages with the images of the row read, if there can be some; see ``ImageReader.messages``."""
        contents = [message.get("content") if isinstance(message, dict) else None for message in messages]
        has_some = self._data.multimodal_keys is not None or any(isinstance(content, list) for content in contents)
        is_awaited = any(isinstance(content, str) and IMAGE_PLACEHOLDER in content for content in contents)
        if not (self.uses_template and (has_some or is_awaited)) or self._images is None:
            return messages
        if not has_some:
            row.refuse(
                f"has the text {IMAGE_PLACEHOLDER}, and no column of images is named; name it with --multimodal-keys "
                "'{\"image\": COLUMN}', or remove the text"
            )
        return self._images.messages(row, messages)

    def _with_tokens(
        self, row: Row, messages: list[Any], text: str, tools: Tools, hidden: dict[str, str]
    ) -> RenderedPrompt:
        """Return the tokens of rendered messages with images: as the processor of the model reads them."""
        assert self._images is not None
        files = files_of(messages)
        token_ids = self._processor_ids(row, self._images.expand(row, text, files), hidden)
        images = self._images.prompt_images(row, files, token_ids)
        return RenderedPrompt(reveal(text, hidden), tuple(token_ids), tools, images)

    def _processor_ids(self, row: Row, text: str, hidden: dict[str, str]) -> list[int]:
        if not hidden.keys().isdisjoint(text):
            return list(self._special.token_ids(row, text, hidden))
        bos = self._tokenizer.bos_token  # a processor adds special tokens unless the template begins with one
        writes_start = bos is not None and text.startswith(bos)
        ids: list[int] = self._tokenizer(text, **({"add_special_tokens": False} if writes_start else {}))["input_ids"]
        return ids

    def expand_images(self, row: Row, messages: Sequence[Any], text: str) -> str:
        """Return the text of rendered messages with the placeholders of their images as the tokenizer reads them."""
        if not _has_images(messages):
            return text
        assert self._images is not None
        return self._images.expand(row, text, files_of(messages))

    def render_conversation(self, row: Row, messages: Sequence[Any], opens_turn: bool = False) -> str:
        """Render a whole conversation; with ``opens_turn`` it ends at the start of the assistant's next turn.

        Raises:
            InputError: For malformed messages, and for special tokens in them; it names the row.
        """
        if not messages:
            row.refuse("the conversation is empty; fill it or remove the row")
        self._check_messages(row, list(messages))
        tools = self._tools(row)
        if self._special.are_in([list(messages), tools]):
            row.refuse("a message has the text of a special token, which would be trained on as that token; remove it")
        return self.expand_images(row, messages, self._apply(row, list(messages), tools, opens_turn))

    def images_of(self, row: Row, messages: Sequence[Any], token_ids: Sequence[int]) -> PromptImages | None:
        """Return the images of a conversation with these tokens; None if it has none."""
        if not _has_images(messages):
            return None
        assert self._images is not None
        return self._images.prompt_images(row, files_of(messages), token_ids)

    def common_prefix(self, one: str, other: str) -> int:
        """Return the length, in characters, of the tokens that two texts begin with in common."""
        return self._special.common_prefix(one, other)

    def ends_turn(self, written: str, message: Mapping[str, Any]) -> bool:
        """Return whether the template has ended the turn of a message in ``written``, its text as far as known."""
        content = written_text(message).strip()
        return self._special.end(written) or not (message.get("tool_calls") or written.rstrip().endswith(content))

    def _tools(self, row: Row) -> Tools:
        tools = tools_of(row, self._tool_key)
        if tools and "tools" in self._kwargs:
            row.refuse("has tools, and --apply-chat-template-kwargs gives others; keep one of the two")
        return tools

    def _escaped(self, row: Row, messages: list[dict[str, Any]], tools: Tools) -> RenderedPrompt:
        (*turns, last), hidden = self._special.hide([*messages, {"role": "tools", "tools": tools}])
        rendered = self._apply(row, turns, last["tools"])
        if _has_images(messages):
            return self._with_tokens(row, messages, rendered, tools, hidden)
        return RenderedPrompt(reveal(rendered, hidden), self._special.token_ids(row, rendered, hidden), tools)

    def _apply(self, row: Row, messages: list[dict[str, Any]], tools: Tools, opens_turn: bool | None = None) -> str:
        """Render messages; ``opens_turn`` takes precedence over the kwargs about the last turn."""
        kwargs = turn_arguments(self._kwargs, messages)
        if opens_turn is not None:
            kwargs |= {"add_generation_prompt": opens_turn, _CONTINUE: False}
        if tools:
            kwargs["tools"] = tools
        if _has_images(messages) and self._images is not None and self._images.template is not None:
            kwargs.setdefault("chat_template", self._images.template)
        if self._asks_for_null:
            messages = [{**message, "content": message.get("content")} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **kwargs))
        except Exception as error:  # templates are the model author's code and may raise anything
            raise InputError(
                f"{row.where}: the chat template refuses the messages ({type(error).__name__}: "
                f"{one_line(str(error), 300)}); correct them, or look at --apply-chat-template-kwargs"
            ) from error

    def _check_messages(self, row: Row, messages: list[Any]) -> None:
        if not self.uses_template:
            row.refuse("the prompt is a list of chat messages; add --apply-chat-template, or give text")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message, dict):
                row.refuse(f'message {number} is {_kind(message)}; write {{"role": ..., "content": ...}}')
            if "role" not in message:
                row.refuse(
                    f"message {number} has no role, only {', '.join(message) or 'nothing'}; write it as "
                    '{"role": "user", "content": ...}'
                )
            calls = self._calls(row, number, message)
            for key in ("role", "content"):
                is_read = key == "content" and (calls or self._has_parts(message))
                if not isinstance(message.get(key), str) and not is_read:
                    row.refuse(f"message {number}: its {key} is {_kind(message.get(key))}; give text")
            self._check_role(row, number, message["role"])
            content = message.get("content")
            if not calls and not (content.strip() if isinstance(content, str) else content):
                row.refuse(f"message {number}: its content is empty; fill it or remove the message")

    def _has_parts(self, message: Mapping[str, Any]) -> bool:
        """Return whether the content is parts that ``with_images`` has read."""
        return isinstance(message.get("content"), list) and self._images is not None

    def _calls(self, row: Row, number: int, message: dict[str, Any]) -> list[Any]:
        """Return the calls of a message; refuse values that are none, and those that would be the whole text unseen."""
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            row.refuse(f"message {number}: its tool_calls are {_kind(calls)}; give a list of objects")
        for place, call in enumerate(calls, start=1):
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                row.refuse(f"message {number}: call {place} of its tool_calls names no function; give it a name")
        if calls and message.get("content") is None and "tool_calls" not in self._template:
            row.refuse(
                f"message {number}: its content is missing or null, and the chat template writes no tool_calls; give "
                "text, which may be empty"
            )
        return calls

    def _check_role(self, row: Row, number: int, role: str) -> None:
        """Refuse a role that is neither common nor named in the template: most templates render any word."""
        if role in ROLES or f"'{role}'" in self._template or f'"{role}"' in self._template:
            return
        row.refuse(
            f"message {number}: the chat template knows no role {one_line(role, 80)!r}; give one of {', '.join(ROLES)}"
        )


def written_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message; of one with parts, nothing, because templates join these in their own ways."""
    content = message.get("content")
    return content if isinstance(content, str) else ""


def files_of(messages: Sequence[Any]) -> list[ImageFile]:
    """Return the images of messages that ``ImageReader.messages`` has read, in order."""
    contents = (message["content"] for message in messages if isinstance(message.get("content"), list))
    return [part["image"] for content in contents for part in content if part["type"] == "image"]


def _has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = (message.get("content") for message in messages)
    return any(part["type"] == "image" for content in contents if isinstance(content, list) for part in content)


def turn_arguments(kwargs: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments of the chat template for ``messages``, which end where the model begins.

    The assistant's turn is opened, unless ``--apply-chat-template-kwargs`` has ``add_generation_prompt`` false. With
    ``continue_final_message``, a last message of the assistant is continued, and after another one the turn is opened.
    """
    arguments = {"add_generation_prompt": True, **kwargs}
    if kwargs.get(_CONTINUE):
        is_answer = bool(messages) and messages[-1]["role"] == "assistant"
        arguments |= {"add_generation_prompt": not is_answer, _CONTINUE: is_answer and kwargs[_CONTINUE]}
    return arguments


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"of type {type(value).__name__}"


def tools_of(row: Row, key: str) -> Tools:
    """Return the tools in column ``key`` of a row, which the chat template shows to the model; None if it has none.

    The column is a list of objects, or its JSON as text. An object without ``type`` is the function itself.

    Raises:
        InputError: The column holds something else.
    """
    value = row.find(key)
    if isinstance(value, str):
        try:
            value = strict_json.loads(value) if value.strip() else None
        except strict_json.StrictJsonError as error:
            row.refuse(f"column {key!r} of tools is not JSON ({error}); {_what_to_do(key)}")
    if not value:
        return None
    if not isinstance(value, list):
        row.refuse(f"column {key!r} of tools is of type {type(value).__name__}; {_what_to_do(key)}")
    for number, tool in enumerate(value, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            row.refuse(f"column {key!r}: tool {number} names no function; {_what_to_do(key)}")
    return value


def _what_to_do(key: str) -> str:
    hint = "" if key != DataArguments.tool_key else ", or name a column that is not there if these are no tools"
    return f"give a list of objects, each with the name of a function, or another column with --tool-key{hint}"
