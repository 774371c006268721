"""The text of an answer, as rewards see it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np


class Detokenizer(Protocol):
    """The part of a tokenizer that generation needs."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> Any:
        """Return the text of one sequence: a list of integers, or an array of them."""
        ...

    def __hash__(self) -> int:
        """Return the hash, which caches need."""
        ...


def answer_text(
    tokenizer: Detokenizer, token_ids: Sequence[int], mask: Sequence[int], ended: bool, stop_texts: Sequence[str] = ()
) -> str:
    """Return the text of a response, with the special tokens that the model wrote, such as ``</think>`` of some models.

    Left out are special tokens that ended an answer, unless they have a text of ``stop_texts``, and the special tokens
    of tools and environments.

    Args:
        tokenizer: The model's.
        token_ids: The response, of one or more answers.
        mask: 1 for each token of the model, 0 for tokens of tools and environments.
        ended: Whether the last token ended its answer.
        stop_texts: Those that ended answers, and stay in them.
    """
    own = np.asarray(mask, bool)
    last = own & ~np.append(own[1:], False)
    last[-1:] &= ended
    hidden = list[int]()
    for at in np.flatnonzero(last | ~own).tolist():
        text = _special_text(tokenizer, token_ids[at])
        if text and not (own[at] and any(stop in text for stop in stop_texts)):
            hidden.append(at)
    # An array: of a list, transformers looks at the type of every number.
    return str(tokenizer.decode(np.delete(np.asarray(token_ids, np.int64), hidden), skip_special_tokens=False))


@lru_cache(maxsize=1 << 16)  # a tool's tokens are looked at in every later turn
def _special_text(tokenizer: Detokenizer, token: int) -> str:
    """Return the text of a special token; none for another token."""
    text = str(tokenizer.decode([token], skip_special_tokens=False))
    return "" if text == tokenizer.decode([token], skip_special_tokens=True) else text
