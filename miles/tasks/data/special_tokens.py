"""Text of special tokens inside chat messages, which is read as text.

A tokenizer turns ``<|im_end|>`` anywhere in a text into the token that ends a turn. In a message it is part of what
somebody wrote: as a token it would end the turn, and the rest could be a turn of any role. Tokens that are
added but not special, such as ``<think>``, are left alone: templates and models use them inside messages.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

from miles.tasks.data.row import Row

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerBase

_PRIVATE = "\ue000"  # joins no text in a token
_PRIVATE_USE = (0xF0000, 0x100000, 0xE000)  # where code points begin that have no meaning of their own


class SpecialTokens:
    """Finds the special tokens of a tokenizer in text, and tokenizes messages in which some of them are text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._names = sorted({*added, *tokenizer.all_special_tokens} - {""}, key=lambda name: (-len(name), name))
        ids: Any = tokenizer.convert_tokens_to_ids(self._names) if self._names else ()
        self._ids: dict[str, int] = dict(zip(self._names, ids, strict=True))
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        flags = {str(token): token for token in tokenizer.added_tokens_decoder.values()}
        self._with_stripped = re.compile(
            "|".join(_with_stripped(name, flags.get(name)) for name in self._names) or "(?!)"
        )

    def are_in(self, value: Any) -> bool:
        """Return whether a text in ``value`` has the text of a special token."""
        return any(self._pattern.search(text) for text in _texts(value))

    def end(self, text: str) -> bool:
        """Return whether ``text`` ends with a special token."""
        return text.endswith(tuple(self._names))

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

        kept = [{**hidden(message), "role": message["role"]} for message in messages]
        return kept, {character: name for name, character in characters.items()}

    def token_ids(self, row: Row, rendered: str, hidden: dict[str, str]) -> tuple[int, ...]:
        """Tokenize rendered messages: the template's special tokens as such, those that were hidden as text.

        A tokenizer reads the text between two special tokens by itself, so the parts are tokenized one by one.
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
        """Whether text at the very start has other tokens than behind a special token (Metaspace of scheme "first")."""
        name, id_ = next(iter(self._ids.items()))
        behind, alone = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in (name + "x", "x"))
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
                    "this tokenizer cannot read a text behind a special token by itself; remove the special text"
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
    """Return ``text`` with what ``hide`` replaced."""
    return text.translate({ord(character): name for character, name in hidden.items()})


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]
