"""``--rm-type math``: equality of mathematical expressions, by math-verify."""

import logging
import re
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from miles.tasks.rewards.answer_text import reference_text, with_plain_minus
from miles.tasks.rewards.base import Reward, Rewards, log_no_verdict
from miles.tasks.rewards.subprocess_call import SubprocessCallTimeout, SubprocessDied, in_parallel, subprocess_call
from miles.types.sample import Prompt, Sample

# How an answer is written: the boxes of a response, and spellings of numbers and words that math-verify misreads.


_BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
# The text that may separate the boxes of one answer: "$x = \boxed{1}$ and $y = \boxed{2}$".
_BETWEEN = re.compile(
    r"(?:\s|[$,;&]|\\(?:q?quad|[()\[\],;! ])|\b(?:and|or)\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|[A-Za-z]\w?\s*=)*"
)
_SEPARATOR = re.compile(r"[,;&]|and|or")
_LONGEST_BETWEEN = 70

_THIN = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{FIGURE SPACE}\N{PUNCTUATION SPACE}\N{THIN SPACE}\N{HAIR SPACE}"
_GROUPS = re.compile(
    rf"(?<=\d)(?:\{{\s*(?:,|\\,)\s*\}}|,?\\[,!;: ](?:\s*\\!)?|\\!,|,\\!|~|[{_THIN}])\s*(?=\d{{3}}(?!\d))"
)
_SPACED_GROUPS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"([-+]?\d+)\s+(\d+)\s*/\s*(\d+)")
_FRACTION_SIGN = re.compile("[¼-¾⅐-⅞]")
_SPACE = re.compile(r"(?<!\\)\\[,;:! ]")
_BARE_ROOT = re.compile(r"(\\sqrt\s*\[[^][]+\])\s*(\w)")
_EXPONENT = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3})(?!\w|\.\d)")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*10\s*(?=\^)")
_SIGNED_POWER = re.compile(r"\^\s*([+-]\s*\d+)")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SIGNS = {"×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup "}
_SIGNS |= {"≠": r"\ne ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "…": r"\ldots ", "\N{FULLWIDTH COMMA}": ","}
_SIGNS |= {r"\varnothing": r"\emptyset ", r"^\degree": r"^\circ ", r"\degree": r"^\circ "}
_SIGN = re.compile("|".join(map(re.escape, _SIGNS)))
_DOTS = r"(?:\\[lc]?dots[bc]?(?![A-Za-z])|\.{3})"
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d*)\.(?P<start>\d*?)(?:\\(?:overline|bar)\s*\{?(?P<line>\d+)\}?|\((?P<round>\d+)\)"
    r"|\\dot\{?(?P<first>\d)\}?(?:(?P<middle>\d*)\\dot\{?(?P<last>\d)\}?)?"
    rf"|(?:(?P<digit>\d)(?P=digit){{2,}}|(?P<period>\d{{2,9}}?)(?P=period)+)\s*{_DOTS})"
)
_CUT_DECIMAL = re.compile(rf"(\.\d+)\s*{_DOTS}")
_DOTTED_LIST = re.compile(rf"(?P<digit>\d?)\s*{_DOTS}")

_SPACES = r"(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z]))*"
_SCALE_WORDS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE = re.compile(
    rf"(?<![\d.])(?P<number>\d+(?:\.\d+)?){_SPACES}(?P<open>\\(?:text|mathrm)\s*\{{\s*)?"
    rf"\b(?P<word>{'|'.join(_SCALE_WORDS)})\b"
)
_CHOICE = re.compile(
    rf"\s*(?:\\(?:text[a-z]*|mathrm|mathbf)\s*\{{\s*)?\(?(?P<letter>[A-J])\s*[).:](?:\s*\}})?{_SPACES}(?P<value>\S.*)",
    re.DOTALL,
)
_UNIT = r"\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}((?:\s*\^\s*\{?\d\}?)?)\s*\}"
_UNIT_FRACTION = re.compile(rf"(?<=[\d}}]){_SPACES}\\[dt]?frac\s*{_UNIT}\s*{_UNIT}")

_CURRENCY_WORD = re.compile(
    r"(?:\\(?:text|mathrm)\s*\{\s*)?\b(?:US|USD|EUR|GBP|JPY|CNY|INR|Rs\.?)\b[\s}]*(?=[-+]?[\d.])"
    r"|\\(?:pounds|euro|yen)(?![A-Za-z])"
)
_END = re.compile(
    r"(?:(?<!\\right)[.;:,]|(?<=[A-Za-z]{2})[!?]|\N{IDEOGRAPHIC FULL STOP}|\\[,;:! ]|\\\\|~|\s)+(?=[\s}]*$)"
)
_SET_OF = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}", re.DOTALL)
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|csc|arcsin|arccos|arctan|log|ln|exp|pi)(?=$|[^A-Za-z])(?!\s+[A-Za-z]{2})"
)
_WORDS = re.compile(
    r"\\(?P<wrapper>text[a-z]*|mbox|mathrm|mathbf|mathit|operatorname|begin|end|mathbb|mathcal|overline)\s*\{[^{}]*\}"
    r"|\\[A-Za-z]+|(?<![_A-Za-z])[A-Za-z]+(?: +[A-Za-z]+)*(?![A-Za-z_])"
)
_READ_BY_NAME = {"infinity", "inf", "sqrt", "percent", "percentage", "pct", "mod", "in"}
_AND_OR = re.compile(r"\b(and|or)\b")


def final_boxes(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` or ``\fbox{}``; None without a box, "" if it is cut off.

    Boxes that only a comma, a semicolon, "and" or "or" separates are one answer of several parts.

    >>> final_boxes(r"Not \boxed{12}. It is $\boxed{3}$ or $\boxed{\frac{1}{2}}$.")
    '3,\\frac{1}{2}'
    """
    open_braces: list[tuple[int, int] | None] = []  # the starts of a box and of its content; None for another brace
    boxes: list[tuple[int, int, int]] = []
    for brace in _BRACE.finditer(text):
        if brace["box"] or brace[0] == "{":
            open_braces.append((brace.start(), brace.end()) if brace["box"] else None)
        elif brace[0] == "}" and open_braces and (box := open_braces.pop()) is not None:
            while boxes and boxes[-1][0] > box[0]:
                boxes.pop()  # inside this one
            boxes.append((*box, brace.start()))
    unclosed = max((box[0] for box in open_braces if box is not None), default=-1)
    if not boxes or unclosed > boxes[-1][0]:
        return None if not boxes and unclosed < 0 else ""
    last = len(boxes) - 1
    while last and _are_parts(text[boxes[last - 1][2] + 1 : boxes[last][0]]):
        last -= 1
    contents = [text[start:end].strip() for _, start, end in boxes[last:]]
    return ",".join(dict.fromkeys(_BRACE.sub(lambda b: "{" if b["box"] else b[0], content) for content in contents))


def _are_parts(between: str) -> bool:
    is_short = len(between) <= _LONGEST_BETWEEN and "\n\n" not in between
    return is_short and bool(_SEPARATOR.search(between)) and bool(_BETWEEN.fullmatch(between))


def spelled_numbers(text: str) -> str:
    r"""Return ``text`` with its numbers as math-verify reads them: grouped, in e-notation, with repeating decimals.

    >>> spelled_numbers(r"12\,345, 1.5e-3, 0.1\overline{6}")
    '12345, 0.0015, \\frac{1}{6}'
    """
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], with_plain_minus(text))
    text = _FRACTION_SIGN.sub(lambda sign: r"\frac{{{}}}{{{}}}".format(*_parts_of(sign[0])), text)
    text = _SUPERSCRIPTS.sub(lambda power: f"^{{{unicodedata.normalize('NFKC', power[0])}}}", text)
    text = _GROUPS.sub("", with_plain_minus(text))
    text = _EXPONENT.sub(lambda number: f"{Decimal(number[0]):f}", text)
    text = _SIGNED_POWER.sub(r"^{\1}", _TIMES_TEN.sub(r"\\times 10", text))
    text = _CUT_DECIMAL.sub(r"\1", _REPEATING.sub(_fraction, text))
    return _DOTTED_LIST.sub(lambda dots: f"{dots['digit']}{',' * bool(dots['digit'])}\\text{{dots}}", text)


def _parts_of(sign: str) -> list[str]:
    return unicodedata.normalize("NFKC", sign).split("\N{FRACTION SLASH}")


def _fraction(decimal: re.Match[str]) -> str:
    parts = {name: digits or "" for name, digits in decimal.groupdict().items()}
    period = decimal["line"] or decimal["round"] or decimal["digit"] or decimal["period"]
    period = period or parts["first"] + parts["middle"] + parts["last"]
    start = parts["start"]
    value = Fraction(int(parts["whole"] + start or "0")) + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(start)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def readable(content: str) -> str:
    r"""Return the content of a box as math-verify reads it: also without currency signs, with words as text.

    >>> readable(r"\$1{,}234.50."), readable("BCA"), readable("xy")
    ('1234.50', '(\\text{BCA})', 'xy')
    """
    text = content.replace(r"\$", "$")
    plain = "".join(c for c in text if unicodedata.category(c) != "Sc")
    plain = re.sub(r"\\text\s*\{\s*\}", "", _CURRENCY_WORD.sub("", plain))
    if plain != text:
        plain = re.sub(r"(?<=\d),(?=\d\d)", "", plain) if re.fullmatch(r"[-+\s]*[\d,]+(?:\.\d+)?\s*", plain) else plain
    text = spelled_numbers(plain).strip("*`\"' \n")
    if _SPACED_GROUPS.fullmatch(text):
        text = text.replace(" ", "")
    text = _BARE_ROOT.sub(r"\1{\2}", _SPACE.sub(" ", _END.sub("", text)))
    if mixed := _MIXED.fullmatch(text):
        text = r"{}\frac{{{}}}{{{}}}".format(*mixed.groups())
    if set_of := _SET_OF.fullmatch(text):
        text = set_of[1]
    text = _UNIT_FRACTION.sub(r"\\text{\1/\3}", text)
    text = _FUNCTION.sub(r"\\\1 ", text)
    return _WORDS.sub(_as_text, text)


def _as_text(words: re.Match[str]) -> str:
    wrapper, text = words["wrapper"], words[0]
    if wrapper is None and text.startswith("\\") or wrapper in ("begin", "end", "mathbb", "mathcal", "overline"):
        return text
    if wrapper is not None:
        text = text[text.index("{") + 1 : -1]
        if text.strip(" ,") in ("and", "or") or (wrapper == "mathrm" and len(text) < 2):
            return words[0]
        return _wrapped(text, words)
    parts = _AND_OR.split(text)
    return "".join(
        part if place % 2 or not part.strip() or _is_mathematics(part) else _wrapped(part, words if not place else None)
        for place, part in enumerate(parts)
    )


def _wrapped(text: str, words: re.Match[str] | None) -> str:
    """Mark ``text`` as words: of a unit, which math-verify leaves out, or in brackets, which keep it."""
    before = "" if words is None else words.string[: words.start()].rstrip()[-4:]
    is_answer = not before or before[-1] in "([{,;:=&<>+" or before.endswith((" and", " or"))
    return rf"(\text{{{text}}})" if is_answer else rf"\text{{{text}}}"


def _is_mathematics(words: str) -> bool:
    """Whether letters are a product, not words or a sequence: ``xy``, but not ``BCA`` and not ``no``.

    Products have small letters, no ``o``, and no vowels if they are long: ``abc`` aside, such letters spell words.
    """
    parts = words.split()
    if words.replace(" ", "").isupper() and len(words.strip()) > 1:
        return False
    return all(
        word in _READ_BY_NAME
        or len(word) == 1
        or (not word.isupper() and (len(word) == 2 and "o" not in word.lower() or not set("aeiou") & set(word.lower())))
        or set(word) <= set("abc")
        for word in parts
    )


SECONDS = 1.0  # of processor time per sample; an ordinary one takes about ten milliseconds
LIMIT = f"{SECONDS:g} s"
SLOW_IMPORTS = ("math_verify",)  # subprocess_call imports them before the time starts
LONGEST_EXACT = 4  # decimal places: amounts of money differ if a digit does, results of a calculation are rounded
_MARKS = re.compile(r"[\s$.,;:!?'\"{}\\]")
_MONEY = re.compile(r"\\\$(?=[-+]?[\d.])")
_OR = re.compile(r"\bor\b|\\text\s*\{\s*or\s*\}|\\(?:lor|vee)(?![A-Za-z])")
_INLINE = re.compile(r"(?<!\\)\$[^$]+(?<!\\)\$|\\[(\[]")
_FORMULA = re.compile(r"\s*(?:\$\$?|\\\(|\\\[)(?P<content>(?:[^$\\]|\\[^()\[\]])+)(?:\$\$?|\\\)|\\\])[\s.]*", re.DOTALL)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are on


class ComparedAsMathematics(Reward[None]):
    """A reward of 1 if the answer in a response equals the label mathematically, else 0."""

    data = "label: LaTeX or a number"
    limit = LIMIT

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        readable_label(prompt, self.name)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare answers and labels."""
        return in_parallel(self._score, samples)

    @abstractmethod
    def answer(self, response: str) -> str | None:
        """Return the text that is searched for the answer; None if there is no answer."""

    def _score(self, sample: Sample) -> float:
        answer = self.answer(sample.response)
        return 0.0 if answer is None else score_answer(sample, answer, self.name)


class Math(ComparedAsMathematics):
    r"""1 if the answer found in the response equals the label mathematically, else 0.

    The answer is the last box (``\boxed{}`` or ``\fbox{}``); without one, math-verify looks for LaTeX and plain
    expressions. math-verify also decides equality, except for numbers: exact ones are compared exactly, floats by their
    first six digits. Words and sequences of letters are text, and a list with dots is its terms. A comparison that does
    not end within ``SECONDS``, or kills its process, is logged and scored 0: no equality was shown. A label that states
    nothing is an error.
    """

    name = "math"
    summary = "1 if the answer equals the label mathematically (math-verify)"

    def answer(self, response: str) -> str:
        """Return the whole response."""
        return response


def score_answer(sample: Sample, answer: str, rm_type: str) -> float:
    """Score 1 if ``answer`` equals the label of ``sample``, else 0.

    Args:
        sample: The sample.
        answer: The text that is searched for the answer.
        rm_type: The reward's name, for messages.

    Raises:
        ValueError: The label is not mathematics.
    """
    label = readable_label(sample.prompt, rm_type)
    try:
        return float(subprocess_call(is_equal, label, answer, seconds=SECONDS))
    except (SubprocessCallTimeout, SubprocessDied) as error:
        log_no_verdict(rm_type, sample, error)
        return 0.0


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
    """Whether ``response`` gives the value of ``label``. May never return."""
    gold, answer = _content_of_label(label), final_boxes(response)
    try:
        if answer is not None and _squeezed(gold) == _squeezed(answer):
            return True
        golds = _of_response(label, None) if gold == label and _INLINE.search(label) else _of_content(gold)
        return any(_is_same(one, other) for one in golds for other in _of_response(response, answer))
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
    return re.sub(r"\s", "", readable(text))


def _of_response(response: str, boxed: str | None) -> list[Any]:
    """Return the readings of the box's content, else of the answer that math-verify finds in a response without one."""
    if boxed is not None:
        return _of_content(boxed)
    text = _MONEY.sub("", response)
    readings = [value for text in dict.fromkeys((text, _scaled(text))) for value in _parse(spelled_numbers(text))]
    numbers = [value for value in readings if not isinstance(value, str) and not value.free_symbols]
    return [*numbers, *(value for text in readings if isinstance(text, str) for value in _of_content(text))]


def _of_content(text: str) -> list[Any]:
    """Return the readings of a formula.

    2e-1 is 0.2, and in a formula with Euler's number it is 2e - 1. 5 million is 5,000,000, and 5 of the unit million.
    A choice with its value, (B) 42, is each of the two.
    """
    from sympy import Set, Union

    if len(parts := _OR.split(text)) > 1:  # math-verify reads "or" as a comma, which joins inequalities otherwise
        regions = [_region(value) for part in parts for value in _parse(f"\\boxed{{{readable(part)}}}")[:1]]
        if all(isinstance(region, Set) and not region.is_FiniteSet for region in regions):
            return [Union(*regions)]
    texts = [text, re.sub(r"(?<![\w.])(\d+)e(-\d)", r"\1 e\2", text), _scaled(text)]
    if choice := _CHOICE.fullmatch(text):
        texts = [*choice.groups(), *texts]
    return [value for text in dict.fromkeys(texts) for value in _parse(f"\\boxed{{{readable(text)}}}")]


def _scaled(text: str) -> str:
    """Return ``text`` with the value of numbers such as 1.5 million."""
    if _SCALE.search(text) is None:
        return text
    return _SCALE.sub(
        lambda scale: f"{Decimal(scale['number']) * 10 ** _SCALE_WORDS[scale['word']]:f}{scale['open'] or ''}",
        _GROUPS.sub("", text),
    )


def _parse(text: str) -> list[Any]:
    from math_verify import parse  # takes a second

    parsed: list[Any] = parse(text, parsing_timeout=None)  # its timeouts do not stop C code; ``subprocess_call`` does
    return parsed


def _is_same(gold: Any, answer: Any) -> bool:
    from math_verify import grader

    if grader.sympy_numeric_eq is not equal_numbers:  # it rounds to 6 decimals, and so takes 1e-7 for 0
        global _equal_matrices
        _equal_matrices, grader.sympy_numeric_eq = grader.sympy_numeric_eq, equal_numbers
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
    from sympy import Eq, I
    from sympy.core.relational import Relational

    if value.atoms(Relational) - value.atoms(Eq):
        return value
    return value.subs({symbol: I for symbol in value.free_symbols if symbol.name == "i"})


def _region(value: Any) -> Any:
    """Return the numbers for which inequalities in one variable hold, as a set; another value unchanged."""
    from math_verify.grader import is_equation, is_relation
    from sympy import FiniteSet, Intersection

    if isinstance(value, str):
        return value
    relations = value.args if isinstance(value, FiniteSet) else (value,)
    if all(is_relation(one) and not is_equation(one) for one in relations) and len(value.free_symbols) == 1:
        return Intersection(*(one.as_set() for one in relations))
    return value


_equal_matrices: Callable[..., bool]


def equal_numbers(one: Any, other: Any, *precision: int) -> bool:
    """Whether two values of sympy are equal: exact ones exactly, floats to six digits or a ten-millionth.

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


REWARD = Math()
