"""``--rm-type last_number``."""

import re
from collections.abc import Sequence
from decimal import Decimal

from miles.tasks.rewards.answer_text import in_ascii, reference_text
from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.math_text import without_groups
from miles.types.sample import Prompt, Sample

# A minus that follows a word, a number or a closing bracket is a subtraction ("7-3"), not a sign; a dash, as a minus.
_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w.)\]]) [-\N{EN DASH}] (?: \\?[$€£¥] )? | (?<==\ ) -\ )?
    (?P<digits> [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) (?: \.[0-9]+ )?  # 1,234,567.8
              | [0-9]+ (?: \.[0-9]+ )?                                 # 1234.5
              | \.[0-9]+ )                                             # .5
    (?P<exponent> [eE] [+-]? [0-9]{1,3} (?![0-9]) )?
    """,
    re.VERBOSE | re.ASCII,
)


class LastNumber(Reward[None]):
    r"""1 if the last number in the response equals the last number in the label, else 0.

    Numbers are compared as exact decimals: 6, 6.0, 006 and 0.6e1 are equal, and 1,234, 1{,}234 and 1\,234 are 1234. So
    a label may hold a whole derivation that ends with its answer.
    """

    name = "last_number"
    summary = "1 if the last number of the response equals the label's"
    data = "label: text with a number, or a number"

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        _reference(prompt)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare numbers."""
        return [float(find_last_number(s.response) == _reference(s.prompt)) for s in samples]


def find_last_number(text: str) -> Decimal | None:
    """Return the last number in ``text``, exactly; None if there is none.

    >>> find_last_number("7-3 = 4, and 1,000 times that is 4,000.50.")
    Decimal('4000.50')
    """
    last = None
    plain = without_groups(in_ascii(text))
    for last in _NUMBER.finditer(plain):  # noqa: B007 (the last one is what we want)
        pass
    if last is None:
        return None
    sign = "-" if last["sign"] else ""
    return Decimal(sign + last["digits"].replace(",", "") + (last["exponent"] or ""))


def _reference(prompt: Prompt) -> Decimal:
    text = reference_text(prompt, "last_number")
    number = find_last_number(text)
    if number is None:
        raise ValueError(
            f"--rm-type last_number: the label {text[:80]!r} of the prompt {prompt.source} holds no number; "
            f"name the column of numeric answers with --label-key, or use --rm-type exact_match"
        )
    return number
