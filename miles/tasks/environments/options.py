"""Settings behind a name: ``key=value,…``."""

from __future__ import annotations

import ast
from typing import Any

from miles.base.input_error import InputError
from miles.base.one_line import one_line


def read_options(text: str, origin: str) -> dict[str, Any]:
    """Return the settings in ``text``; values are numbers, lists and the like of Python, true, false, or bare text.

    Raises:
        InputError: A part is not ``key=value``, or a key is there twice. The message begins with ``origin``.

    >>> read_options("size=10,split=test", "--prompt-data x")
    {'size': 10, 'split': 'test'}
    """
    options: dict[str, Any] = {}
    for pair in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not (key and equals and value):
            raise InputError(f"{origin}: {one_line(pair, 100)!r} is not key=value; write size=1000,seed=1")
        if key in options:
            raise InputError(f"{origin}: {one_line(key, 100)!r} is given twice; keep one of them")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text  # a bare word is text
