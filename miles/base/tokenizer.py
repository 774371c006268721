"""Load the tokenizer of a model, and find the token that ends a turn in its chat template.

A chat template ends a turn with a token behind the message, or with the one that begins the next role's turn.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from miles.base.flags import FlagError
from miles.base.text import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = "theanswer"


class TokenizerFault(FlagError):
    """A tokenizer cannot be loaded although its files can be read; it may need torch."""


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder in Hugging Face format, or of a name on its hub.

    Raises ``FlagError`` if it cannot be loaded.
    """
    from transformers import AutoTokenizer  # slow to import; the settings are checked before

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        # Without files, transformers makes an empty one of some types.
        if set(tokenizer.get_vocab()) <= {str(token) for token in tokenizer.added_tokens_decoder.values()}:
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:  # transformers raises many kinds: OSError, KeyError, the Rust library's own
        reason = one_line(str(error).strip().split("\n")[0], 300)
        kind = FlagError if isinstance(error, OSError) else TokenizerFault
        raise kind(
            f"--hf-checkpoint {path}: cannot load a tokenizer from it ({type(error).__name__}: {reason}); give a "
            f"folder with tokenizer.json and tokenizer_config.json, or a name on the Hugging Face hub"
        ) from error


tokenizer_of_process = lru_cache(maxsize=1)(load_tokenizer)  # half a second; not for two threads that tokenize at once


def next_added_token(tokenizer: PreTrainedTokenizerBase, text: str, start: int = 0) -> str:
    """Return the added token that ``text`` has at ``start``, with the white space before it; "" if it has none."""
    names = sorted(map(str, tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    match = re.compile(rf"\s*(?:{'|'.join(map(re.escape, names)) or '(?!)'})").match(text, start)
    return "" if match is None else match[0]


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
