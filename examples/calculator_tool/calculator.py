"""A trajectory in turns: the model writes ``calc(47 * 86)``, the calculator adds `` = 4042``, the model goes on."""

from __future__ import annotations

import operator
import re

from miles.rollout.trajectory import Trajectory, token_ids_with

MAX_CALLS = 3
CALL = re.compile(r"calc\(\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def answer(text: str) -> str | None:
    """What the calculator says to the last call in ``text``; None where there is none.

    >>> answer("So calc(47 * 86)")
    ' = 4042'
    """
    calls = CALL.findall(text)
    if not calls:
        return None
    left, sign, right = calls[-1]
    return f" = {OPERATORS[sign](int(left), int(right))}"


async def generate(trajectory: Trajectory) -> None:
    """``--custom-generate-function-path examples.calculator_tool.calculator:generate``.

    Each turn ends at a closing bracket, and the response with its line. The model's tokens are trained on, the
    calculator's are not: their loss mask is 0.
    """
    brackets = token_ids_with(trajectory.tokenizer, ")")
    line_ends = token_ids_with(trajectory.tokenizer, "\n")
    for _ in range(MAX_CALLS):
        turn = await trajectory.generate(stop_token_ids=(*brackets, *line_ends))
        stopped_at_bracket = bool(turn.token_ids) and turn.token_ids[-1] in brackets
        if not stopped_at_bracket or trajectory.finished:
            return
        if (result := answer(turn.text)) is not None:
            trajectory.append(result)
    await trajectory.generate(stop_token_ids=line_ends)
