"""Suggest a flag for one that does not exist: related to it, and never its opposite."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_NEAR = 0.84  # similarity of a flag with a typing error to the right one
_OPPOSITES = (("no", ""), ("disable", "enable"), ("disable", ""), ("skip", ""), ("without", "with"))
# Words that flags here and elsewhere have for one thing: --tis-lower-bound is --tis-clip-low.
_SYNONYMS = {"lower": "low", "upper": "high", "bound": "clip", "bounds": "clip", "cap": "clip", "coeff": "coef"}
_COMMON = {"num", "size", "path", "type", "max", "min", "use", "no", "enable", "disable", "per", "custom", "id", "ids"}


def suggestion(flag: str, known: Iterable[str]) -> str:
    """Return what to do about ``flag``, which does not exist.

    Args:
        flag: The flag, as written.
        known: All flags that exist.
    """
    near = nearest_flag(flag, known)
    return f"did you mean {near}?" if near else "--help lists all flags"


def nearest_flag(flag: str, known: Iterable[str]) -> str | None:
    """Return the flag that ``flag`` was meant to be, which is never its opposite; None if none is related."""
    candidates = [name for name in known if name.startswith("--") and not _are_opposite(flag, name)]
    near = _with_a_typing_error(flag, candidates) or _with_same_words(flag, candidates)
    return near[0] if near else None


def near_choice(value: str, choices: Iterable[str]) -> str | None:
    """Return the choice that a wrong ``value`` was meant to be: the one that it is a part of, or spelled almost like.

    >>> near_choice("sft", ["policy_loss", "sft_loss"])
    'sft_loss'
    """
    names = list(choices)
    parts = [name for name in names if value and value in name.split("_")]
    near = parts if len(parts) == 1 else difflib.get_close_matches(value, names, n=1, cutoff=_NEAR)
    return near[0] if near else None


def _with_a_typing_error(flag: str, candidates: Sequence[str]) -> list[str]:
    """Return the flag that is spelled almost like ``flag``, unless the words that differ are words of other flags.

    A word that other flags have is no typing error: ``--tis-lower-bound`` is not a misspelled ``--rs-lower-bound``.
    """
    vocabulary = {word for name in candidates for word in _words(name)}

    def is_another(name: str) -> bool:
        ours, theirs = _words(flag), _words(name)
        pairs = zip(ours, theirs, strict=False) if len(ours) == len(theirs) else ()
        return any(one.rstrip("s") != other.rstrip("s") and one in vocabulary for one, other in pairs)

    near = difflib.get_close_matches(flag, candidates, n=5, cutoff=_NEAR)
    return [name for name in near if not is_another(name)][:1]


def _words(flag: str) -> list[str]:
    return flag.removeprefix("--").split("-")


def _are_opposite(one: str, other: str) -> bool:
    """Return whether two flags differ by a word that turns one into the opposite of the other."""
    for left, right in ((one, other), (other, one)):
        for negative, positive in _OPPOSITES:
            words = _words(left)
            if words[0] == negative and [*([positive] if positive else []), *words[1:]] == _words(right):
                return True
    return _is_negative(one) != _is_negative(other)


def _is_negative(flag: str) -> bool:
    return _words(flag)[0] in {negative for negative, _ in _OPPOSITES}


def _meanings(flag: str) -> set[str]:
    """Return the words that tell a flag from others, with one word for one thing."""
    return {_SYNONYMS.get(word, word) for word in _words(flag)} - _COMMON


def _with_same_words(flag: str, candidates: Iterable[str]) -> list[str]:
    """Return the flag that shares most words with ``flag``, if these are most of the words of both."""
    wanted = _meanings(flag)

    def share(name: str) -> float:
        words = _meanings(name)
        return len(wanted & words) / max(1, len(wanted | words))

    best = max(
        candidates, key=lambda name: (share(name), difflib.SequenceMatcher(None, flag, name).ratio()), default=None
    )
    return [best] if best is not None and share(best) >= 0.5 else []
