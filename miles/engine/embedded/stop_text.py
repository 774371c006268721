"""End a response as soon as it contains one of the texts of ``--rollout-stop``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MARGIN = 4  # tokens before those that may hold a text: a decoder may drop the space of the first


class StopText:
    """Say whether the last token of a response completes one of ``texts``."""

    def __init__(self, texts: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        """``decode`` returns the text of tokens, special ones too."""
        self._texts = tuple(texts)
        self._decode = decode
        # A token has at least one byte, so a text of n bytes is in the last n tokens.
        self._tail = _MARGIN + max(len(text.encode("utf-8")) for text in texts)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Return whether ``token_ids`` end a response. Call it after each token: only the end is looked at."""
        text = self._decode(list(token_ids[-self._tail :]))
        return any(stop in text for stop in self._texts)
