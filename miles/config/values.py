"""Read values in the spellings that launch scripts use."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from miles.base import strict_json


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


def set_name(source: str) -> str:
    """Return a name for an evaluation set that was given without one: ``aime-2024`` for ``data/aime-2024.jsonl``."""
    return Path(source).stem or source


def is_object(text: str | None) -> bool:
    """Return whether ``text`` is a JSON object, or no text: what cannot be read is reported, and not left out."""
    try:
        return text is None or isinstance(strict_json.loads(text), dict)
    except ValueError:
        return False


def environment_strings(text: str) -> str | None:
    """Return a JSON object of environment variables with every value as a string; None if it is so already.

    Raises:
        ValueError: It is no JSON object.
    """
    values = strict_json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    strings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    return None if strings == values else json.dumps(strings)
