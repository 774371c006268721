"""The token that ends a turn: the template writes it behind the message, or it begins the next role's turn."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "theanswer"


def next_added_token(tokenizer: PreTrainedTokenizerBase, text: str, start: int = 0) -> str:
    """Return the added token that ``text`` has at ``start``, with the white space before it; "" if it has none."""
    names = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    found = re.compile(rf"\s*(?:{'|'.join(map(re.escape, names)) or '(?!)'})").match(text, start)
    return "" if found is None else found[0]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the added token that ends the assistant's turn, with the white space before it; "" if there is none."""
    if not tokenizer.chat_template:
        return ""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
    for following in ([], messages[:1]):
        try:
            rendered: Any = tokenizer.apply_chat_template([*messages, *following], tokenize=False)
        except Exception:  # templates are the model author's code and may raise anything
            return ""
        behind = str(rendered).rpartition(_MARK)[2]
        if behind.strip():
            return next_added_token(tokenizer, behind)
    return ""
