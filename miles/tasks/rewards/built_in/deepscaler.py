"""``--rm-type deepscaler``: equality of the boxed answer that follows the model's reasoning."""

import re

from miles.tasks.rewards.built_in.math import ComparedAsMathematics
from miles.tasks.rewards.math_text import BRACE

_ENDS_OF_REASONING = ("</think>", "###Response")
_BOX_START = re.compile(r"\\(?:boxed|fbox)\s*\{")


class DeepScaler(ComparedAsMathematics):
    r"""1 if the last ``\boxed{}`` after the reasoning equals the label mathematically, else 0.

    Reasoning ends at the last ``</think>``, or at ``###Response``. A response that does not end its reasoning, or boxes
    no answer after it, scores 0. Equality is the same as for ``--rm-type math``.
    """

    name = "deepscaler"
    summary = "math, of the last box after the reasoning"

    def answer(self, response: str) -> str | None:
        """Return the box after the reasoning."""
        return in_box(boxed_answer(response))


def in_box(content: str | None) -> str | None:
    """Return ``content`` as a box again, which is read as the answer whatever it holds; None stays None."""
    return None if content is None else f"\\boxed{{{content}}}"


def boxed_answer(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` after the reasoning, or None.

    >>> boxed_answer("<think>\\boxed{1}</think> it is \\boxed{\\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for end in _ENDS_OF_REASONING:
        _, separator, solution = response.rpartition(end)
        if separator:
            return last_box(solution)
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}`` of a text; None without one, or if it is cut off."""
    last = max((box.start() for box in _BOX_START.finditer(text)), default=len(text))
    depth, start = 0, -1
    for brace in BRACE.finditer(text, last):
        if brace["box"]:
            depth, start = 1, brace.end()
        elif brace[0] in ("{", "}"):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[start : brace.start()]
    return None
