"""``--rm-type gpqa``: the letter of a multiple-choice answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from miles.rewards.answer_text import after_reasoning, tagged_answer
from miles.rewards.base import Reward, Rewards
from miles.rewards.built_in.deepscaler import last_box
from miles.rewards.reference import reference_text
from miles.sample import Sample

LETTERS = 4  # of a prompt without a list of choices
_WRAPPED = r"[\s*_$(\[{\\]{0,8}(?:(?:text|mathrm|textbf|mathbf)\s{0,2}\{\s{0,2})?\(?([A-Z])(?![A-Za-z0-9'])"
_STATED = re.compile(
    rf"(?i:answer|choice|option)\b[\s*_]{{0,4}}(?:is\b|:|=)?[\s*_]{{0,4}}(?i:option\b|choice\b)?{_WRAPPED}"
)
_ALONE = re.compile(_WRAPPED)
# What turns one letter into several: "A, B", "A or B", "A/B".
_ANOTHER = re.compile(r"[)\]}*_$.\s]{0,8}(?:,|/|&|;|\+|and\b|or\b)[\s*_$(\[{\\]{0,8}[A-Z](?![A-Za-z0-9'])")


class Gpqa(Reward):
    r"""1 if the letter that the response answers with is the label, else 0.

    Looked at, in this order, is what follows the reasoning (``</think>``): the content of ``<answer>``, the content of
    the last ``\boxed{}``, the last statement such as "the answer is (B)" or "Answer: B", and a response that begins
    with the letter and is at most a line. A statement of several letters is no answer. The metadata may hold
    ``choices``, a list; else there are four.
    """

    name = "gpqa"
    summary = "1 if the letter of the answer is the label"
    data = "label: a letter; metadata `choices`: a list (optional)"

    def score(self, samples: Sequence[Sample], flags: Any) -> Rewards:
        """Compare letters."""
        return [float(chosen_letter(sample.response) == _label(sample)) for sample in samples]


def chosen_letter(response: str) -> str | None:
    r"""Return the letter that the response answers with; None if it states none, or several.

    >>> chosen_letter("A is wrong, so the answer is **(B)**.")
    'B'
    """
    tagged = tagged_answer(response)
    text = after_reasoning(response) if tagged is None else tagged
    boxed = last_box(text)
    if boxed is not None:
        return _only_letter(boxed)
    if tagged is None:
        stated = None
        for stated in _STATED.finditer(text):  # noqa: B007 (the last one is what we want)
            pass
        if stated is not None:
            return None if _ANOTHER.match(text, stated.end(1)) else stated[1]
    return _only_letter(text)


def _only_letter(text: str) -> str | None:
    """Return the letter that a line begins with; None if there is another line, or another letter behind it."""
    text = text.strip()
    found = _ALONE.match(text)
    if found is None or "\n" in text or _ANOTHER.match(text, found.end(1)):
        return None
    rest = text[found.end(1) :].lstrip("*_$ ")
    return found[1] if not rest or rest[0] in ")]}.:" else None


def _label(sample: Sample) -> str:
    choices = sample.prompt.metadata.get("choices")
    number = len(choices) if isinstance(choices, list) and choices else LETTERS
    letters = [chr(ord("A") + place) for place in range(min(number, 26))]
    label = reference_text(sample.prompt, "gpqa").strip("()").upper()
    if label not in letters:
        raise ValueError(
            f"--rm-type gpqa: the label {label[:80]!r} of the prompt {sample.prompt.source} is none of the letters "
            f"{letters[0]} to {letters[-1]}; name another column with --label-key, or correct the row"
        )
    return label


REWARD = Gpqa()
