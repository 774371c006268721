"""``--rm-type math``: equality of mathematical expressions, by math-verify."""

import logging
import re
from abc import abstractmethod
from collections.abc import Callable
from decimal import Decimal
from typing import Any

from miles.tasks.rewards.answer_text import after_reasoning, reference_text, tagged_answer
from miles.tasks.rewards.base import SubprocessReward
from miles.tasks.rewards.math_text import (
    choice_of,
    contradict,
    final_boxes,
    readable,
    readings,
    scaled,
    spelled_numbers,
)
from miles.tasks.rewards.subprocess_call import subprocess_call
from miles.types.sample import Prompt, Sample

SECONDS = 1.0  # of processor time per sample; an ordinary one takes about ten milliseconds
LIMIT = f"{SECONDS:g} s"
SLOW_IMPORTS = ("math_verify",)  # subprocess_call imports them before the time starts
LONGEST_EXACT = 4  # decimal places: amounts of money differ if a digit does, results of a calculation are rounded
_MARKS = re.compile(r"[\s$.,;:!?'\"{}\\]")
_MONEY = re.compile(r"\\\$(?=[-+]?[\d.])")
_OR = re.compile(r"\bor\b|\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])")
_DENIED = re.compile(r"\bnot\s+\$?[-+]?\d[\d.,]*\d?\$?", re.IGNORECASE)
_EITHER = re.compile(r"(?<![\w.,])(\d+(?:\.\d+)?)\s+or\s+(\d+(?:\.\d+)?)(?=\D*\Z)")
_PROSE = re.compile(r"\n|(?:\b[A-Za-z]{2,}[ ,]+){3}")
_INLINE = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\[(\[]")
_FORMULA = re.compile(r"\s*(?:\$\$?|\\\(|\\\[)(?P<content>(?:[^$\\]|\\[^()\[\]])+)(?:\$\$?|\\\)|\\\])[\s.]*", re.DOTALL)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are on


class ComparedAsMathematics(SubprocessReward[None]):
    """A reward of 1 if the answer in a response equals the label mathematically, else 0."""

    data = "label: LaTeX or a number"
    limit = LIMIT

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        readable_label(prompt, self.name)

    @abstractmethod
    def answer(self, response: str) -> str | None:
        """Return the text that is searched for the answer; None if there is no answer."""

    def judge(self, sample: Sample, flags: None) -> float:
        """Compare the answer with the label."""
        answer = self.answer(sample.response)
        if answer is None:
            return 0.0
        return float(subprocess_call(is_equal, readable_label(sample.prompt, self.name), answer, seconds=SECONDS))


class Math(ComparedAsMathematics):
    r"""1 if the answer after the reasoning equals the label mathematically, else 0.

    The answer is the last box (``\boxed{}`` or ``\fbox{}``), else the content of ``<answer>``; without either,
    math-verify looks for LaTeX and plain expressions. math-verify also decides equality, except for numbers: exact ones
    are compared exactly, floats by their first six digits. Words and sequences of letters are text, and a list with
    dots is its terms. A comparison that does not end within ``SECONDS``, or kills its process, is logged and scored 0:
    no equality was shown. A label that states nothing is an error.
    """

    name = "math"
    summary = "1 if the answer equals the label mathematically (math-verify)"

    def answer(self, response: str) -> str:
        """Return what follows the reasoning; if that has no box, the content of ``<answer>``."""
        text, tagged = after_reasoning(response), tagged_answer(response)
        if tagged is None or final_boxes(text) is not None:
            return text
        return tagged if _INLINE.search(tagged) or _PROSE.search(tagged.strip()) else f"\\boxed{{{tagged}}}"


def readable_label(prompt: Prompt, rm_type: str) -> str:
    """Return the label of a prompt; more than marks and white space, with each brace closed.

    Raises:
        ValueError: It is not mathematics.
    """
    label = reference_text(prompt, rm_type)
    content = _content_of_label(label)
    braces = re.sub(r"\\.", "", content)
    if braces.count("{") == braces.count("}") and _MARKS.sub("", content):
        return label
    raise ValueError(
        f"--rm-type {rm_type}: the label {label[:80]!r} of the prompt {prompt.source} is not mathematics; "
        f"write LaTeX or a number there, or use --rm-type exact_match"
    )


def is_equal(label: str, response: str) -> bool:
    """Return whether ``response`` gives the value of ``label``. May never return."""
    gold = _content_of_label(label)
    answer = final_boxes(response)
    try:
        if answer is not None:
            if contradict(gold, answer):
                return False
            if _squeezed(gold) == _squeezed(answer):
                return True
            (_, gold_value), (_, answer_value) = choice_of(gold), choice_of(answer)
            if gold_value and answer_value:
                gold, answer = gold_value, answer_value
        golds = _of_response(label, None) if gold == label and _INLINE.search(label) else _of_content(gold)
        answers = _of_response(response, answer) if golds else []
        return any(_is_same(one, other) for one in golds for other in answers)
    except Exception:  # RecursionError and MemoryError too, on model output: it shows no equality
        return False


def warm_up() -> None:
    """Compare a set, which fills caches of the parser and of sympy: the first one takes a second on a slow core."""
    is_equal("(1,2]", r"\boxed{\{x \mid 1 < x \le 2\}}")


def _content_of_label(label: str) -> str:
    """Return the mathematics of a label without its box or delimiters."""
    boxed = final_boxes(label)
    if boxed is not None:
        return boxed
    formula = _FORMULA.fullmatch(label)
    return label if formula is None else formula["content"]


def _squeezed(text: str) -> str:
    """Return ``text`` without wrappers and white space, except between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\(?\\text\{([^{}]*)\}\)?", r"\1", readable(text)))


def _of_response(response: str, boxed: str | None) -> list[Any]:
    """Return the readings of the box's content, else of the answer that math-verify finds in a response without one."""
    if boxed is not None:
        return _of_content(boxed)
    text = _EITHER.sub(r"$\1,\2$", _DENIED.sub("", _MONEY.sub("", response)))
    texts = dict.fromkeys((text, scaled(text)))
    values = [value for text in texts for value in _parse(spelled_numbers(text), is_formula=False)]
    numbers = [value for value in values if not isinstance(value, str) and not value.free_symbols]
    return [*numbers, *(value for text in values if isinstance(text, str) for value in _of_content(text))]


def _of_content(text: str) -> list[Any]:
    """Return the values of a formula."""
    from sympy import Set, Union

    if len(parts := _OR.split(text)) > 1:  # math-verify reads "or" as a comma, which joins inequalities otherwise
        regions = [_region(value) for part in parts for value in _parse(f"\\boxed{{{readable(part)}}}")[:1]]
        if all(isinstance(region, Set) and not region.is_FiniteSet for region in regions):
            return [Union(*regions)]
    return [
        value
        for reading in readings(text)
        for value in _parse(f"\\boxed{{{readable(reading)}}}")
        if not isinstance(value, str)
    ]


def _parse(text: str, *, is_formula: bool = True) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse  # takes a second

    # In a formula that it cannot read, such as ``x \\mapsto 3``, no number is searched for: 3 is not its value.
    kinds = [LatexExtractionConfig()] if is_formula else [LatexExtractionConfig(), ExprExtractionConfig()]
    parsed: list[Any] = parse(text, kinds, parsing_timeout=None)  # its timeouts do not stop C code, ours do
    return parsed


def _is_same(gold: Any, answer: Any) -> bool:
    from math_verify import grader

    if grader.sympy_numeric_eq is not equal_numbers:  # it rounds to 6 decimals, and so takes 1e-7 for 0
        global _equal_matrices
        _equal_matrices, grader.sympy_numeric_eq = grader.sympy_numeric_eq, equal_numbers
    if any(map(_are_points, (gold, answer))) and any(map(_is_inequality, (gold, answer))):
        return False
    pairs = [(gold, answer)]
    if not isinstance(gold, str) and not isinstance(answer, str):
        pairs.append((_with_imaginary_unit(gold), _with_imaginary_unit(answer)))
    names: set[Any] = getattr(gold, "free_symbols", set())
    others: set[Any] = getattr(answer, "free_symbols", set())
    if names == others or not (names and others):
        pairs.append((_region(gold), _region(answer)))
    return any(grader.verify(*pair, timeout_seconds=None, allow_set_relation_comp=True) for pair in pairs)


def _with_imaginary_unit(value: Any) -> Any:
    """Return ``value`` with the letter i as the imaginary unit, which math-verify reads as a variable.

    In an inequality it is one.
    """
    from sympy import I

    if _is_inequality(value):
        return value
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})


def _is_inequality(value: Any) -> bool:
    from sympy import Eq
    from sympy.core.relational import Relational

    return not isinstance(value, str) and bool(value.atoms(Relational) - value.atoms(Eq))


def _are_points(value: Any) -> bool:
    """Return whether ``value`` is a set of numbers, which math-verify takes for the range between two of them."""
    from sympy import FiniteSet
    from sympy.core.relational import Relational

    return isinstance(value, FiniteSet) and not value.atoms(Relational)


def _region(value: Any) -> Any:
    """Return the numbers for which inequalities in one variable hold, as a set; another value unchanged."""
    from math_verify.grader import is_equation, is_relation
    from sympy import FiniteSet, Intersection

    if isinstance(value, str):
        return value
    relations = value.args if isinstance(value, FiniteSet) else (value,)
    if all(is_relation(each) and not is_equation(each) for each in relations) and len(value.free_symbols) == 1:
        return Intersection(*(each.as_set() for each in relations))
    return value


_equal_matrices: Callable[..., bool]


def equal_numbers(one: Any, other: Any, *precision: int) -> bool:
    """Return whether two values of sympy are equal: exact ones exactly, floats to six digits or a ten-millionth.

    ``x`` percent is also ``x``, as math-verify has it. Values with variables are left to math-verify's simplification.
    """
    from math_verify.grader import get_pct_val
    from sympy import Float, MatrixBase, MatrixExpr, N, Rational

    if isinstance(one, MatrixBase | MatrixExpr) or isinstance(other, MatrixBase | MatrixExpr):
        return _equal_matrices(one, other, *precision)
    share, other_share = get_pct_val(one), get_pct_val(other)
    if share is not None and other_share is not None:
        one, other = share, other_share
    elif (share is not None and equal_numbers(share, other)) or (
        other_share is not None and equal_numbers(one, other_share)
    ):
        return True
    written = [_as_written(value) for value in (one, other)]
    if None not in written:
        return bool(written[0] == written[1])
    one, other = one.doit(), other.doit()
    if one.free_symbols or other.free_symbols:
        return False
    if isinstance(one, Rational) and isinstance(other, Rational):
        return bool(one == other)
    if one.is_infinite or other.is_infinite:
        return bool(one == other)
    is_rounded = one.has(Float) or other.has(Float)
    if not is_rounded and 0 in (one, other):
        return bool(one.equals(other))
    one, other = N(one, 50), N(other, 50)
    largest = max(abs(one), abs(other))
    if largest == 0 or abs(one - other) <= largest * Rational(10) ** (-7 if is_rounded else -40):
        return True
    return is_rounded and one.is_real and other.is_real and _six_digits(one) == _six_digits(other)


def _as_written(value: Any) -> Decimal | None:
    """Return a whole number, or a decimal with few digits; None for anything else."""
    from sympy import Float, Integer

    if not isinstance(value, Float | Integer):
        return None
    written = Decimal(int(value)) if isinstance(value, Integer) else Decimal(repr(float(value)))
    exponent = written.as_tuple().exponent
    return written if isinstance(exponent, int) and exponent >= -LONGEST_EXACT else None


def _six_digits(value: Any) -> str:
    return f"{Decimal(str(value)):.5e}"
