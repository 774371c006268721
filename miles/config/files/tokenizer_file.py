"""Compare the tokenizers of two models by their files, without transformers."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

NAME = "tokenizer.json"


def ordinary_tokens(folder: str) -> dict[str, int] | None:
    """Return the id of each token in the ``tokenizer.json`` of ``folder``; None without one that can be read.

    Tokens that were added to the vocabulary, as special tokens are, are left out: models of one family have others.
    """
    try:
        found = json.loads((Path(folder) / NAME).read_text(encoding="utf-8"))
        vocabulary: Any = found["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(vocabulary, dict):
        return {token: number for token, number in vocabulary.items() if type(number) is int}
    if isinstance(vocabulary, list):  # pairs of a token and its score; the id is the position
        return {pair[0]: number for number, pair in enumerate(vocabulary) if _names_token(pair)}
    return None


def _names_token(pair: object) -> bool:
    return isinstance(pair, list) and bool(pair) and isinstance(pair[0], str)


def _same_file(folder: str, own: str) -> bool:
    """Return whether both have the same bytes, as models of one family do: to read them as JSON takes a second."""
    try:
        return filecmp.cmp(Path(folder) / NAME, Path(own) / NAME, shallow=False)
    except (OSError, ValueError):
        return False


def fault_of_tokens(folder: str, own: str) -> str | None:
    """Return how the tokenizer of the model in ``folder`` contradicts that of ``own``, as part of a sentence.

    None if they agree on all tokens that both have, or if one of the folders has no file to compare.
    """
    if _same_file(folder, own):
        return None
    there, here = ordinary_tokens(folder), ordinary_tokens(own)
    if there is None or here is None:
        return None
    others = [token for token, number in here.items() if there.get(token, number) != number]
    if not others:
        return None
    example = others[0]
    return (
        f"its {NAME} has other ids for {len(others)} of {len(here)} tokens ({example!r:.40} is {there[example]}, and "
        f"{here[example]} in {own})"
    )
