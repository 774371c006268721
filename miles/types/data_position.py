"""Check a saved position in the prompts, as a checkpoint has it, before a run continues from it.

There are three kinds: in one set or in several sets (stream.py), and in the user's own source
(custom_source.py). The position of a run that draws no prompts is empty.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any


def check_position(state: object) -> None:
    """Check that ``state`` is one that a run has saved. Raises ``ValueError`` that names the malformed part."""
    if not isinstance(state, dict):
        raise ValueError("it is no object")
    if "sets" in state:
        _check_sets(state)
    elif "source" in state:
        _check(isinstance(state["source"], dict), "source")
        _check_rows(state, "unfinished", 2, _count(state, "next_group_index"))
        _check(all(isinstance(row, dict) for _, row in state["unfinished"]), "unfinished")
    elif state:
        _check_set(state)


def positions_in_sets(state: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Return the position in each set of prompts; none for the user's own source and a run without prompts."""
    if "sets" in state:
        sets: Mapping[str, Mapping[str, Any]] = state["sets"]
        return sets.values()
    return [state] if "seed" in state else []


def _check_set(state: Mapping[str, Any]) -> int:
    """Check the position in one set, and return its number of prompts."""
    prompts = _count(state, "num_prompts")
    _check(prompts > 0, "num_prompts")
    _check(type(state.get("shuffle")) is bool, "shuffle")
    _check(type(state.get("seed")) is int, "seed")
    _count(state, "epoch")
    _check(_count(state, "position") <= prompts, "position")
    _check_counts(state.get("unfinished", []), "unfinished", _count(state, "next_group_index"))
    _check_counts(state.get("mastered", []), "mastered", prompts)
    _check(isinstance(state.get("fingerprint", ""), str), "fingerprint")
    return prompts


def _check_sets(state: Mapping[str, Any]) -> None:
    sets = state["sets"]
    _check(isinstance(sets, dict) and bool(sets) and all(isinstance(one, dict) for one in sets.values()), "sets")
    sizes = [_check_set(one) for one in sets.values()]
    lists = ["weights", "credits"]
    if "given_weights" in state:
        lists.append("given_weights")
    for name in lists:
        value = state.get(name)
        _check(isinstance(value, list) and len(value) == len(sizes) and all(map(_is_number, value)), name)
    _check_rows(state, "unfinished", 3, _count(state, "next_group_index"))
    _check_rows(state, "named", 2, len(sizes))
    for name in ("unfinished", "named"):
        for *_, number, position in state[name]:
            _check(_is_count(number, len(sizes)) and _is_count(position, sizes[number]), name)
    for row in _list(state.get("known", []), "known"):
        is_whole = isinstance(row, list) and len(row) == 6 and isinstance(row[0], str) and row[0] in sets
        _check(is_whole and _is_count(row[1]) and all(map(_is_number, row[2:])), "known")


def _check_rows(state: Mapping[str, Any], name: str, length: int, below: int) -> None:
    """Check a list of lists of one length, which begin with a number from 0 to ``below``."""
    for row in _list(state.get(name), name):
        _check(isinstance(row, list) and len(row) == length and _is_count(row[0], below), name)


def _check_counts(value: object, name: str, below: int) -> None:
    _check(all(_is_count(each, below) for each in _list(value, name)), name)


def _count(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    _check(_is_count(value), name)
    assert isinstance(value, int)
    return value


def _list(value: object, name: str) -> list[Any]:
    _check(isinstance(value, list), name)
    assert isinstance(value, list)
    return value


def _is_count(value: object, below: float = math.inf) -> bool:
    return type(value) is int and 0 <= value < below


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _check(is_right: bool, name: str) -> None:
    if not is_right:
        raise ValueError(f"{name} is malformed")
