"""Generate alternately: the model writes ``calc(47 * 86)``, the calculator appends `` = 4042``, the model continues."""

from __future__ import annotations

import operator
import re

from miles.rollout.trajectory import Trajectory, token_ids_with

MAX_CALLS = 3
CALL = re.compile(r"calc\(\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*\)")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def answer(text: str) -> str | None:
    """Return the calculator's answer to the last call in ``text``, or None if there is no call.

    >>> answer("So calc(47 * 86)")
    ' = 4042'
    """
    calls = CALL.findall(text)
    if not calls:
        return None
    left, sign, right = calls[-1]
    return f" = {OPERATORS[sign](int(left), int(right))}"


async def generate(trajectory: Trajectory) -> None:
    """Generate one trajectory (``--custom-generate-function-path examples.calculator_tool.calculator:generate``).

    A turn ends at a closing bracket, and the response at the end of its line. The model is trained on its own tokens.
    The calculator's tokens have loss mask 0.
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
