r"""How an answer is written: the boxes of a response, and spellings of numbers and words that math-verify misreads."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

from miles.tasks.rewards.answer_text import with_plain_minus

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
    found = words.split()
    if words.replace(" ", "").isupper() and len(words.strip()) > 1:
        return False
    return all(
        word in _READ_BY_NAME
        or len(word) == 1
        or (not word.isupper() and (len(word) == 2 and "o" not in word.lower() or not set("aeiou") & set(word.lower())))
        or set(word) <= set("abc")
        for word in found
    )
