"""``--rm-type dapo``: mathematics as DAPO scores it (arXiv 2503.14476), 1 or -1."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from miles.rewards.answer_text import with_plain_minus
from miles.rewards.base import Reward, Rewards
from miles.rewards.built_in.deepscaler import last_box
from miles.rewards.reference import reference_text
from miles.sample import Sample

END = 300  # characters at the end of a response in which the answer is looked for
# The value stops at the end of the line. ``[^\S\n]`` is white space but a line break.
_ANSWER = re.compile(r"answer[^\S\n]*:([^\n]*)", re.IGNORECASE)
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[!,;: ()\[\]]|\s|~|\\?\$|\\left|\\right")
_DEGREES = re.compile(r"\^\{?\\circ\}?|\\%|%")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")


class Dapo(Reward):
    r"""1 if the answer is the label, else -1: R(y', y) of equation 7 in the paper.

    The answer is what follows ``Answer:`` on the last line that has it, within the last 300 characters, as the paper's
    prompt asks for ("Answer: $Answer"). Delimiters of formulas, dollar signs, a box, a left side (``x =``), text and
    space commands, thousands separators, ``%`` and degree signs are set aside; then the texts must be the same. The
    labels of DAPO-Math-17k are whole numbers, for which this is equality. The authors' code also sets aside a list of
    English units; here the words of an answer count, so ``5 apples`` is not ``5``.
    """

    name = "dapo"
    summary = "1 if the line 'Answer: …' at the end gives the label, else -1"
    data = "label: text or a number"

    def score(self, samples: Sequence[Sample], flags: Any) -> Rewards:
        """Compare the last answer line."""
        return [1.0 if _is_right(sample) else -1.0 for sample in samples]


def _is_right(sample: Sample) -> bool:
    label = plain_value(reference_text(sample.prompt, "dapo"))
    answers = _ANSWER.findall(sample.response[-END:])
    return bool(answers) and bool(label) and plain_value(answers[-1]) == label


def plain_value(text: str) -> str:
    r"""Return the value that a line states, without what DAPO sets aside.

    >>> plain_value(r"$x = \boxed{1,234}$.")
    '1234'
    """
    text = with_plain_minus(text)
    boxed = last_box(text)
    value = (text if boxed is None else boxed).rpartition("=")[2]
    value = _DEGREES.sub("", _SPACES.sub("", _WRAPPERS.sub(r"\1", value)))
    value = value.replace("dfrac", "frac").replace("tfrac", "frac").removesuffix(".").strip("*")
    if _THOUSANDS.fullmatch(value):
        value = value.replace(",", "")
    whole = _WHOLE.fullmatch(value)
    return value if whole is None else whole[1].removeprefix("+") + whole[2]


REWARD = Dapo()
