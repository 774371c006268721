"""Check the values of flags that are passed on to SGLang's server and router, as its parser would when it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, assert_never

from miles.arguments.launch.spelling import group_words
from miles.arguments.launch.suggest import near_choice
from miles.arguments.sglang.installed import Accepted, Reading, has_plugins, router_flags, server_flags
from miles.arguments.sglang.server_flags import ROUTER, SERVER, ServerFlags
from miles.flags import Errors

_SIZE = re.compile(r"\d+(\.\d+)?[kMGT]|\d+[KMGT]i")  # a number with a suffix: decimals only of powers of 1000


def check_server_values(flags: ServerFlags, errors: Errors) -> None:
    """Check how many values each flag has, and that SGLang can read them.

    Args:
        flags: The words that are passed on.
        errors: Collects what is wrong, and has the flags that are refused already.
    """
    _check_words(SERVER, flags.server, server_flags(), errors)
    _check_words(ROUTER, flags.router, router_flags(), errors)


def _check_words(prefix: str, words: Sequence[str], known: Mapping[str, Accepted], errors: Errors) -> None:
    for flag, values in group_words(words):
        field = (prefix + flag.removeprefix("--")).removeprefix("--")
        accepted = known.get(flag)
        fault = None if accepted is None or not errors.none_about(field) else _fault(accepted, values)
        if fault is not None:
            errors.refuse(field, values or None, *fault)


def _fault(accepted: Accepted, values: Sequence[str]) -> tuple[str, str] | None:
    """Return the rule that the values of a flag break, and what to do; None if SGLang can read them."""
    if accepted.most == 0 and values:
        return "is a switch, which takes no value", "drop the value, or the flag if it is to be off"
    if len(values) < accepted.least:
        return "has no value", "add one"
    if accepted.most is not None and len(values) > accepted.most:
        return "takes one value", "give one; a value with spaces is written in quotes"
    for word in values:
        try:
            value = _read(word, accepted.reading)
        except ValueError:
            return _RULES[accepted.reading]
        if accepted.choices and value not in accepted.choices and not has_plugins():
            return _no_such_choice(word, accepted.choices)
    return None


def _read(word: str, reading: Reading) -> Any:
    """Return what SGLang reads.

    Raises:
        ValueError: SGLang cannot read it.
    """
    match reading:
        case "text":
            return word
        case "int":
            return int(word)
        case "float":
            return float(word)
        case "size":
            return word if _SIZE.fullmatch(word.strip()) else int(word)
        case "json":
            return json.loads(word)
        case unknown:
            assert_never(unknown)


_RULES: dict[Reading, tuple[str, str]] = {
    "int": ("SGLang reads a whole number", "give one, such as 4"),
    "float": ("SGLang reads a number", "give one, such as 0.5"),
    "size": ("SGLang reads a whole number, or a number with k, M, G, T, Ki, Mi, Gi or Ti", "give one, such as 16k"),
    "json": ("SGLang reads JSON", """write it in single quotes, such as '{"key": "value"}'"""),
}


def _no_such_choice(word: str, choices: Sequence[Any]) -> tuple[str, str]:
    names = [str(choice) for choice in choices if choice is not None]
    near = near_choice(word, names)
    return "no such choice", (f"did you mean {near}? SGLang has " if near else "give one of ") + ", ".join(names)
