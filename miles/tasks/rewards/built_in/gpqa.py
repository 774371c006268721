"""``--rm-type gpqa``: the letter of a multiple-choice answer."""

import re
from collections.abc import Sequence
from functools import lru_cache

from miles.tasks.rewards.answer_text import after_reasoning, in_ascii, reference_text, tagged_answer
from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.math_text import final_boxes
from miles.types.sample import Prompt, Sample

LETTERS = 4  # of a prompt without a list of choices
_OPENING = r"[\s*_$(\[{{<\\\"'`“‘]{{0,8}}"
# A small letter counts if only marks follow it on its line: "a" is an article too.
_SMALL = r"(?i:[A-{last}])(?=[)\]}}>*_$\"'`”’.:,;]{{0,8}}[^\S\n]{{0,8}}(?:\n|\Z))"
_LETTER = rf"(?:[A-{{last}}](?![A-Za-z0-9]|['’-][A-Za-z])|{_SMALL})"
_WRAPPER = r"(?:(?:text|math)(?:[a-z]{{2}})?|boldsymbol|bm)\s{{0,2}}\{{\s{{0,2}}"
_WRAPPED = _OPENING + rf"(?:{_WRAPPER})?\(?({_LETTER})"
_NAMED = r"[\s*_]{{0,4}}(?i:(?:the\s)?(?:option|choice|letter)\b)?" + _WRAPPED
_TEXT_NAMED = r"\\text\{{(?i:option|choice)\b" + _WRAPPED
_ADVERBS = r"(?:\s{{1,4}}(?:therefore|thus|hence|indeed|most|[a-z]{{2,12}}ly)){{0,2}}"
_IS = rf"\b(?i:is|(?:would|should|must) be)\b{_ADVERBS}[\s*_]{{{{0,4}}}}:?"
# "Answer: B", "the answer is B", "the answer that I choose is B".
_ANSWER = rf"(?i:answer)\b(?:[^.\n:=]{{{{0,40}}}}?{_IS}|[\s*_\"']{{{{0,4}}}}[:=])" + _NAMED
_CHOICE = r"(?i:choice|option)\b[\s*_]{{0,4}}(?:is\b|:|=)" + _NAMED
_MARKS = r"[)\]}}>*_$\\\"'`”’]{{0,8}}"
_CALLED_RIGHT = r"(?i:choice|option|answer)" + _WRAPPED + _MARKS + r" is (?:the )?(?i:correct|right|best)\b"
_IS_RIGHT = r"(?<![A-Za-z0-9])" + _WRAPPED + _MARKS + r" is the (?i:(?:correct|right|best) (?:answer|choice|option))\b"
# The text ahead of a statement that takes it back or makes it several: "if the answer is A", "neither A nor B is …".
_DENIAL = re.compile(
    r"(?:\b(?:if|whether|suppose|assume|assuming|unless|not|no|neither|nor|either|both|false|[A-Z]\W{1,4}(?:and|or))\b"
    r"|n['’]t\b|(?<![A-Za-z])[A-Z]\W{0,3}[,/&])"
    r"(?: (?:think|believe|say|true|sure|that|the|correct|right|best|final|option|choice|my)\b){0,5}"
    r"[ *_$(\[{\\\"'`“‘]{0,8}\Z",
    re.IGNORECASE,
)
# The text after one letter that makes it several: "A, B", "A or B", "A/B", "A (or B)", "A (5) or (B)", "A B C".
_NEXT = (
    r"[)\]}}*_$.\s(\"']{{0,8}}(?:,?\s{{0,2}}(?:and|or|nor)\b(?:\s(?:maybe|perhaps|possibly|probably|also|even|option|choice))?"
    r"|,|/|&|;|\+|to\b|\)\(|[^.\n(),]{{0,60}}\bor\b(?=\s\(?[A-Z]\)))"
)
_UNLESS_WRONG = r"(?!\W{{0,4}}(?:is|was|would be) (?:wrong|incorrect|false|not)\b)"
_RANGE = rf"[)\]}}}}*_$]{{{{0,4}}}}\s?[-–—]\s?\(?{_LETTER}(?![)\]}}}}*_$.]{{{{0,4}}}}\s?[a-z])"
_LISTED = rf"[)\]}}}}*_$]{{{{0,4}}}}[ \t](?=\(?{_LETTER}\)?[ \t]{{{{0,4}}}}(?:\n|\Z|\(?{_LETTER}))"
_ANOTHER = rf"(?:{_RANGE}|(?:{_NEXT}|{_LISTED})[\s*_$(\[{{{{\\\"']{{{{0,8}}}}{_LETTER})" + _UNLESS_WRONG
# Another line that begins with a choice, and one that is nothing else.
_LINE = rf"\n[\s*_(]{{{{0,8}}}}{_LETTER}(?=[)\]}}}}*_]{{{{0,4}}}}(?:[).:\n]|\Z))"
_BARE_LINE = rf"\n[\s*_(]{{{{0,8}}}}{_LETTER}[)*_.]{{{{0,4}}}}\s{{{{0,8}}}}(?:\n|\Z)"
_HEADING = re.compile(r"(?:^|\n)[^\S\n]{0,3}(?:#|\*\*)[#*_ ]{0,8}(?i:(?:final |correct )?answer)[*_ ]{0,8}\n")


class Gpqa(Reward[None]):
    r"""1 if the letter that the response answers with is the label, else 0.

    Looked at, in this order, is what follows the reasoning (``</think>``): the content of ``<answer>``, the content of
    the last ``\boxed{}``, the last statement such as "the answer is (B)" or "Answer: B", the last one such as "the
    right choice is B", then "option B is correct" or "B is the correct answer", the line below the heading "Answer",
    and the letter that the first line begins with, if no other line begins with one. A statement of several letters is
    no answer, and neither are one that is denied ("neither A nor B is …", "if the answer is A") and a letter beyond the
    choices. A small letter counts if only marks follow it. The metadata may hold
    ``choices``, a list; else there are four.
    """

    name = "gpqa"
    summary = "1 if the letter of the answer is the label"
    data = "label: a letter; metadata `choices`: a list (optional)"

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        _label(prompt)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare letters."""
        return [
            float(chosen_letter(sample.response, _number(sample.prompt)) == _label(sample.prompt)) for sample in samples
        ]


def chosen_letter(response: str, number: int = LETTERS) -> str | None:
    r"""Return which of the first ``number`` letters the response answers with; None if it states none, or several.

    >>> chosen_letter("The answer is **(B)**, because option A is wrong.")
    'B'
    """
    tagged = tagged_answer(response)
    text = in_ascii(after_reasoning(response) if tagged is None else tagged)
    boxed = final_boxes(text)
    text = boxed or text
    if (boxed or tagged is not None) and (letter := _only_letter(text, number)) is not None:
        return letter
    for statement in (_ANSWER, _CHOICE, _CALLED_RIGHT, _IS_RIGHT):
        stated = None
        for match in _pattern(statement, number).finditer(text):
            if not _DENIAL.search(text, max(0, match.start() - 60), match.start()):
                stated = match
        if stated is not None:
            return None if _pattern(_ANOTHER, number).match(text, stated.end(1)) else stated[1].upper()
    *before, last = _HEADING.split(text)
    return _only_letter(last.strip().partition("\n")[0] if before else text, number)


@lru_cache
def _pattern(text: str, number: int) -> re.Pattern[str]:
    return re.compile(text.format(last=chr(ord("A") + number - 1)))


def _only_letter(text: str, number: int) -> str | None:
    """Return the letter that the first line begins with; None if another follows there, or begins another line."""
    line, _, more = text.strip().partition("\n")
    match = _pattern(_NAMED, number).match(line) or _pattern(_TEXT_NAMED, number).match(line)
    if match is None or _pattern(_ANOTHER, number).match(line, match.end(1)):
        return None
    rest = line[match.end(1) :].lstrip("*_$\"'`”’ ").removeprefix("\\text{")
    if _pattern(_LINE if rest.strip(")]}>.: ") else _BARE_LINE, number).search("\n" + more):
        return None
    return match[1].upper() if not rest or rest[0] in ")]}>.:" else None


def _number(prompt: Prompt) -> int:
    choices = prompt.metadata.get("choices")
    return min(len(choices), 26) if isinstance(choices, list) and choices else LETTERS


def _label(prompt: Prompt) -> str:
    letters = [chr(ord("A") + place) for place in range(_number(prompt))]
    label = reference_text(prompt, "gpqa").strip("()").upper()
    if label not in letters:
        raise ValueError(
            f"--rm-type gpqa: the label {label[:80]!r} of the prompt {prompt.source} is none of the letters "
            f"{letters[0]} to {letters[-1]}; name another column with --label-key, or correct the row"
        )
    return label
