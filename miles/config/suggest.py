"""Suggest a flag for one that does not exist: related to it, and never its opposite."""

import ast
import difflib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from miles.base import strict_json

_NEAR = 0.84  # similarity of a flag with a typing error to the right one
_JOINED = 0.95  # the same without hyphens, of flags that differ in the number of words
_OPPOSITES = (("no", ""), ("disable", "enable"), ("disable", ""), ("skip", ""), ("without", "with"))
_NEGATIVE = {negative for negative, _ in _OPPOSITES}
_EXTREMES = {"min", "max"}
# Words that flags here and elsewhere have for one thing: --tis-lower-bound is --tis-clip-low.
_SYNONYMS = {
    "lower": "low",
    "upper": "high",
    "bound": "clip",
    "bounds": "clip",
    "cap": "clip",
    "coeff": "coef",
    "length": "len",
    "epsilon": "eps",
}
_COMMON = {"num", "size", "path", "dir", "type", "max", "min", "use", "per", "custom", "id", "ids"}
_COMMON |= {"no", "enable", "disable"}


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
    flags = [name for name in known if name.startswith("--")]
    hyphened = flag.replace("_", "-")  # as Megatron spells some
    if flag != hyphened and hyphened in flags:
        return hyphened
    flag = hyphened
    candidates = [name for name in flags if not _are_opposite(flag, name)]
    near = _with_a_typing_error(flag, candidates) or _with_same_words(flag, candidates, flags)
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
    Nor is a word too many: ``--rollout-n`` is not ``--rollout-min-p``.
    """
    vocabulary = {word for name in candidates for word in _words(name)}

    def is_another(name: str) -> bool:
        words, others = _words(flag), _words(name)
        if len(words) != len(others):
            return difflib.SequenceMatcher(None, "".join(words), "".join(others)).ratio() < _JOINED
        pairs = zip(words, others, strict=True)
        return any(one.rstrip("s") != other.rstrip("s") and one in vocabulary for one, other in pairs)

    near = difflib.get_close_matches(flag, candidates, n=5, cutoff=_NEAR)
    return [name for name in near if not is_another(name)][:1]


@lru_cache(maxsize=8192)  # the known flags, for each flag that does not exist
def _words(flag: str) -> tuple[str, ...]:
    return tuple(flag.removeprefix("--").split("-"))


def _are_opposite(one: str, other: str) -> bool:
    """Return whether two flags differ by a word that turns one into the opposite of the other."""
    of_one, of_other = _words(one), _words(other)
    if {*of_one}.symmetric_difference(of_other) >= _EXTREMES:
        return True
    is_negative = of_one[0] in _NEGATIVE, of_other[0] in _NEGATIVE
    if not any(is_negative):
        return False
    for words, opposite in ((of_one, of_other), (of_other, of_one)):
        for negative, positive in _OPPOSITES:
            if words[0] == negative and ((positive,) if positive else ()) + words[1:] == opposite:
                return True
    return is_negative[0] != is_negative[1]


@lru_cache(maxsize=8192)
def _meanings(flag: str) -> frozenset[str]:
    """Return the words of a flag, with one word for one thing."""
    words = "-".join(_words(flag)).replace("learning-rate", "lr").split("-")
    return frozenset(_SYNONYMS.get(word, word) for word in words)


def _with_same_words(flag: str, candidates: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the flag that shares more than half of the words of both with ``flag``, if no other shares as many.

    A word that one or two flags have counts twice. So ``--max-staleness`` is ``--max-weight-staleness``, and
    ``--num-gpus`` is none of the flags that count GPUs.
    """
    wanted = _meanings(flag)
    flags_with = Counter(word for name in known for word in _meanings(name))

    def size(words: frozenset[str]) -> int:
        return sum(2 if flags_with[word] <= 2 else 1 for word in words - _COMMON)

    def share(name: str) -> float:
        words = _meanings(name)
        shared = size(wanted & words)
        return shared / max(1, size(wanted | words)) if shared else 0.0

    shares = {name: share(name) for name in candidates}
    most = max(shares.values(), default=0)
    best = [name for name in shares if shares[name] == most]
    if most <= 0.5 or (len(best) > 1 and most < 1):
        return []
    alike = {name: difflib.SequenceMatcher(None, flag, name).ratio() for name in best}
    return [max(best, key=lambda name: (-len(wanted ^ _meanings(name)), alike[name]))]


# Read values in the spellings that launch scripts use.


def whole_numbers(text: str) -> list[int]:
    """Read whole numbers from JSON (``[1,1]``), a comma list (``1,1``), or a Python sum (``[0]*3+[1]*75``).

    Raises:
        ValueError: It is none of these.
    """
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
        if value == []:
            raise ValueError("an empty list")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{text!r} is not a list of whole numbers, such as 1,1 or [0]*3+[1]*5") from None
    return [value] if isinstance(value, int) else value


def _evaluate(node: ast.expr) -> Any:
    """Evaluate lists of integers, ``+`` and ``*``. Nothing else is Python here."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _evaluate(node.operand)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        values = [_evaluate(element) for element in node.elts]
        if all(isinstance(value, int) for value in values):
            return values
    if isinstance(node, ast.BinOp):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int) and 0 <= right <= 10_000:
            return left * right
    raise ValueError(ast.unparse(node))


def environment_strings(text: str) -> str | None:
    """Return a JSON object of environment variables with every value as a string; None if it is so, or no object."""
    try:
        values = strict_json.loads(text)
    except strict_json.StrictJsonError:
        return None  # the validator reports it
    if not isinstance(values, dict):
        return None
    strings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return None if strings == values else json.dumps(strings)
