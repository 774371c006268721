"""Text of special tokens inside chat messages, which is read as text.

A tokenizer turns ``<|im_end|>`` anywhere in a text into the token that ends a turn. In a message it is part of what
somebody wrote: as a token it would end the turn, and the rest could be a turn of any role. Tokens that are
added but not special, such as ``<think>``, are left alone: templates and models use them inside messages.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from miles.data.row import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    def are_in(self, value: Any) -> bool:
        """Return whether a text in ``value`` has the text of a special token."""
        return any(self._pattern.search(text) for text in _texts(value))

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
        for match in self._pattern.finditer(rendered):
            ids += self._text_ids(row, reveal(rendered[end : match.start()], hidden))
            ids.append(self._ids[match[0]])
            end = match.end()
        return (*ids, *self._text_ids(row, reveal(rendered[end:], hidden)))

    def _text_ids(self, row: Row, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if self.are_in(text) and not set(ids).isdisjoint(self._ids.values()):
            row.refuse("this tokenizer cannot read the text of a special token as text; remove it from the messages")
        return ids


def reveal(text: str, hidden: dict[str, str]) -> str:
    """Return ``text`` with what ``hide`` replaced."""
    return text.translate({ord(character): name for character, name in hidden.items()})


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in parts for text in _texts(part)]
