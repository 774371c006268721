"""How mathematical answers are written: the boxes of a response, and spellings that math-verify misreads."""

import re
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from miles.tasks.rewards.answer_text import in_ascii

BRACE = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
# The text that may separate the boxes of one answer: "$x = \boxed{1}$ and $y = \boxed{2}$".
_BETWEEN = re.compile(
    r"(?:\s|[$,;&]|\\(?:q?quad|[()\[\],;! ])|\b(?:and|or)\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|[A-Za-z]\w?\s*=)*"
)
_SEPARATOR = re.compile(r"[,;&]|and|or")
_LONGEST_BETWEEN = 70

_THIN = "\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{FIGURE SPACE}\N{PUNCTUATION SPACE}\N{THIN SPACE}\N{HAIR SPACE}"
_GROUPS = re.compile(
    rf"(?<=\d)(?:\{{\s*(?:,|\\,)\s*\}}|\\[,;: ](?:\s*\\!)?|,?\\!|\\!,|~|[{_THIN}])\s*(?=\d{{3}}(?!\d))"
)
_DOTTED_GROUPS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:\.\d{3}){2,}(?![\d.]\d)(?!\d)")
_SPACED_GROUPS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_MIXED = re.compile(r"([-+]?\d+)\s+(\d+)\s*/\s*(\d+)")
_FRACTION_SIGN = re.compile("[¼-¾⅐-⅞]")
_SPACE = re.compile(r"(?<!\\)\\[,;:! ]|~")
_SPACE_AT_END = re.compile(r"(?<!\\)\\\s+\Z")
_BARE_ROOT = re.compile(r"(\\sqrt\s*\[[^][]+\])\s*(\w)")
_EXPONENT = re.compile(r"(?<![\w.])((?:\d+\.?\d*|\.\d+)[eE][+-]?\d{1,3})(?!\w|\.\d)")
_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX*]\s*10\s*(?=\^)")
_SIGNED_POWER = re.compile(r"\^\s*([+-]\s*\d+)")
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SIGNS = {"×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup "}
_SIGNS |= {"≠": r"\ne ", "∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "…": r"\ldots "}
_SIGNS |= {"º": r"^\circ ", "≈": r"\approx ", "′": "'", "″": "''"}
_SIGNS |= {r"\varnothing": r"\emptyset ", r"^\degree": r"^\circ ", r"\degree": r"^\circ ", r"\colon": ":"}
_SIGNS |= {r"\langle": "(", r"\rangle": ")", r"\lbrace": r"\{", r"\rbrace": r"\}", "ℝ": r"\mathbb{R}"}
_SIGNS |= {r"\nicefrac": r"\frac", r"\sfrac": r"\frac"}
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
_WRAPPER = r"\\(?:text[a-z]*|mathrm|mathbf|mathsf|mbox)\s*\{\s*"
_OF_CHOICE = r"(?:-?(?:\d|\\[dt]?frac|\\sqrt|\\pi)|\\?\$|\\text|[A-Za-z]).*"
_CHOICE = re.compile(  # (B) 42, \textbf{(B)}\ 42, B., Option B
    rf"(?:{_WRAPPER})?(?P<named>(?i:option|choice|answer)\b\s*:?\s*)?\(?(?P<letter>[A-J])(?P<close>[).])?(?:\s*\}})?"
    rf"(?:(?:\s|~|\\[,;:! ]|\\q?quad(?![A-Za-z])|(?<=\}}))+(?P<value>{_OF_CHOICE}))?",
    re.DOTALL,
)
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-J](?![A-Za-z])(?!\s*[=+^_*/(-])")  # another choice
_UNIT = r"\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}((?:\s*\^\s*\{?\d\}?)?)\s*\}"
_UNIT_FRACTION = re.compile(rf"(?<=[\d}}]){_SPACES}\\[dt]?frac\s*{_UNIT}\s*{_UNIT}")

_CURRENCY_WORD = re.compile(
    r"(?:\\(?:text|mathrm)\s*\{\s*)?\b(?:US|USD|EUR|GBP|JPY|CNY|INR|Rs\.?)\b[\s}]*(?=[-+]?[\d.])"
    r"|\\(?:pounds|euro|yen)(?![A-Za-z])"
)
_NEAR = 40  # characters around a word, or at the end, that are looked at
_END = re.compile(
    r"(?:(?<!\\right)[.;:,]|(?<=[A-Za-z]{2})[!?]|\N{IDEOGRAPHIC FULL STOP}|\\[,;:! ]|\\\\|~|\s)+(?=[\s}]*$)"
)
_SET_OF = re.compile(r"\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?\s*)?(?:\\mid|\\vert|\||:)(.*)\\\}", re.DOTALL)
_FUNCTION = re.compile(
    r"(?<![\\A-Za-z])(sin|cos|tan|cot|csc|arcsin|arccos|arctan|log|ln|exp|pi)(?=$|[^A-Za-z])(?!\s+[A-Za-z]{2})"
)
_WORDS = re.compile(
    r"\\(?P<wrapper>text[a-z]*|mbox|mathrm|mathbf|mathit|operatorname|begin|end|mathbb|mathcal|overline)\s*\{[^{}]*\}"
    r"|\\[A-Za-z]+|(?<![_A-Za-z])(?<!_\{)[A-Za-z]+(?: +[A-Za-z]+)*(?![A-Za-z_])"
)


def _mixed_percent(parts: re.Match[str]) -> str:
    whole, above, below = map(int, parts.groups())
    return rf"\frac{{{whole * below + above}}}{{{below}}}\%"


def _listed(text: re.Match[str]) -> str:
    parts = re.split(r"\s*(?:,|;|&|\band\b)\s*", text[1])
    has_number = any(character.isdigit() for character in text[1])
    return text[0] if has_number else ",".join(f"\\text{{{part.strip('()')}}}" for part in parts if part)


def _system(equations: re.Match[str]) -> str:
    rows = equations[2].replace("&=", "=")
    return equations[0] if "&" in rows or r"\text" in rows else rows.replace(r"\\", ",")  # cases of a function


def _ratio(terms: re.Match[str]) -> str:
    first, *others = map(str.strip, terms[0].split(":"))
    if any(other.startswith("0") for other in others):  # a time
        return _date(terms)
    return f"(1,{','.join(rf'({other})/({first})' for other in others)})"


def _date(parts: re.Match[str]) -> str:
    return rf"d_{{{'n'.join(number.lstrip('0') for number in re.findall(r'[0-9]+', parts[0]))}}}"


_MONTHS = "(?:Jan|Febr)uary|March|April|May|June|July|August|(?:Septem|Octo|Novem|Decem)ber"
_IN_BRACES = r"(?:[^{}]|\{[^{}]*\})*"
_DEGREES = r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*"
_GREEK = r"(\\(?:pi|alpha|beta|gamma|delta|theta|lambda|mu|nu|rho|sigma|tau|varphi|phi|omega)(?![A-Za-z]))"
_ARGUMENT = rf"(?:\{{{_IN_BRACES}\}}|\w)"
_TRIGONOMETRIC = r"(sin|cos|tan|cot|sec|csc)(\s*\^\s*(?:\{\s*-?\d\s*\}|\d)|)"
# What math-verify misreads or leaves out, and what it reads instead. Applied in this order,
# and compiled when they are first used: every command imports this file.
_MISREAD: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"\{\{([^{}]*)\}\}", r"{\1}"),  # a box inside \text{}
    (rf"\\(?:boldsymbol|bm|underline|math(?:bf|sf|tt)|ensuremath|emph)\s*\{{({_IN_BRACES})\}}", r" \1"),
    (r"\\(?:(?:text)?color|hspace)\s*\{[^{}]*\}", ""),
    (r"\{\s*\\rm\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\\(?:rm|bf|it|checkmark|small|large|Large|LARGE|huge|Huge|[bB]igg?[lmr]?)(?![A-Za-z])", ""),
    (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
    (r"\\(hat|vec|bar|tilde)\s+([A-Za-z])", r"\\\1{\2}"),
    (rf"(\\[dt]?frac|\\sqrt)\s*{_GREEK}", r"\1{\2}"),
    (rf"(\\[dt]?frac\s*{_ARGUMENT})\s*{_GREEK}", r"\1{\2}"),
    (rf"\^\s*(\\[dt]?frac\s*{_ARGUMENT}\s*{_ARGUMENT})", r"^{\1}"),
    (r"\\lg(?![A-Za-z])", r"\\log_{10}"),
    (r"^([^{}]+?)\\choose(?![A-Za-z])([^{}]+)$", r"\\binom{\1}{\2}"),
    (r"(?s)\\begin\s*\{(cases|aligned|gathered)\}(.*?)(?:\\\\\s*)?\\end\s*\{\1\}", _system),
    (rf"^\s*\\(?:mathrm|text|ce)\s*\{{(?=[^{{}}]*[_^])({_IN_BRACES})\}}\s*$", r"\1"),  # H_2O
    (r"(?<=\d)\s*\^\s*\{?\s*\\(?:text|mathrm)\s*\{\s*(?:st|[nr]d|th)\s*\}\s*\}?", ""),
    (
        r"^\s*\\text[a-z]*\s*\{(?=[^{}]*\d)(?![^{}]*\d-\d)((?:[^{}A-Za-z]|\b(?:and|or|[nxyz])\b)+)\}\s*$",
        r"\1",
    ),  # mathematics as text
    (r"^\s*\\text[a-z]*\s*\{([^{}]*(?:,|;|&|\band\b)[^{}]*)\}\s*$", _listed),
    (r"^[^:,=()]+(?::[^:,=()]+){2,}$", _ratio),
    (r"\\log\s*_\s*(?:e|\{\s*e\s*\})(?![A-Za-z])", r"\\ln "),
    (r"\\mathrm\s*(?:\{\s*([ie])\s*\}|([ie])(?![A-Za-z]))", r"\1\2"),
    (
        r"\\(?:text[a-z]*|mathrm|mbox)\s*\{\s*([-+]?\d[\d,]*(?:\.\d+)?)((?:\\?%)?)"
        rf"((?:(?:\s+|(?=[A-Za-z]{{2}}))(?!(?:or|and|to|by|{'|'.join(_SCALE_WORDS)}|{_MONTHS})\b)[A-Za-z]+){{0,3}})\s*\}}",
        r"\1\2\\text{\3}",  # a number with its unit
    ),
    (r"(?:\{\s*:\s*\}|\\text\s*\{\s*:\s*\})", ":"),
    (r"(?<=[\d}])\s*(?:\\text\s*\{\s*|\b)(?:percent|pct)\b\s*\}?", r"\\%"),
    (r"(?<!\d)(\d+)\s*\\[dt]?frac\s*\{?(\d+)\}?\s*\{?(\d+)\}?\s*\\?%", _mixed_percent),
    (rf"(?<!\d)(\d+){_DEGREES}(\d+)\s*(?:'|\^\s*\{{?\s*\\prime\s*\}}?)", r"\\frac{\1*60+\2}{60}^\\circ "),
    (rf"(?<=[\d}}])({_DEGREES})(?:\\(?:text|mathrm)\s*\{{\s*)?[CF]\b\s*\}}?", r"\1"),
    *(
        (rf"\\{_TRIGONOMETRIC}\s*{opened}(\d+(?:\.\d+)?){_DEGREES}{closed}", r"\\\1\2(\\frac{\3\\pi}{180})")
        for opened, closed in ((r"\(\s*", r"\)"), (r"\{\s*", r"\}"), ("", ""))
    ),
    (r"\\([bp]?mod)\s*(\d+)", r"\\\1{\2}"),
    (r"\\(?:overrightarrow|vec|overline)\s*\{\s*([A-Za-z]{2,})\s*\}", r" v_{\1}"),
    (r"\\(?:triangle|angle|Delta)\s*([A-Z]{2,})", r" a_{\1}"),
    (r"(?<![A-Za-z])([A-Za-z])('+)", lambda prime: f"{prime[1]}_{{{'p' * len(prime[2])}}}"),
    (r"(?<![A-Za-z\\])([Ee])_(?:\{(\w+)\}|(\w))", r"x_{\1\2\3}"),  # a symbol, not Euler's number
    (r"(?:√|(?<![A-Za-z\\])sqrt)\s*(?:(\d+|[A-Za-z])|\(((?:[^()]|\([^()]*\))*)\))", r"\\sqrt{\1\2}"),
    (r"(?<=[\w)}])\s*\*\*\s*(-?\d+)", r"^{\1}"),
    (r"(?:^|(?<=[=,(]))\s*\N{EN DASH}\s*(?=[\d\\])", "-"),
    (r"^\s*(?:=|\\(?:approx|simeq|sim(?=\s*\d)|therefore|implies|Rightarrow)(?![A-Za-z]))", ""),
    (r"^\s*(?=[<>]|\\(?:[lg]eq?|[lg]t|neq?|[lg]eqslant)(?![A-Za-z]))", "x "),
    (r"(?<=\d)\s*\\q?quad\s*(?=[-+]?\d)", ","),
    (r"^\s*(?:\\text\s*\{\s*)?\d{4}-\d\d?-\d\d?\s*\}?\s*$", _date),  # no subtraction
    (r"^\s*(?:\\text\s*\{\s*)?\d\d?/\d\d?/\d{4}\s*\}?\s*$", _date),
]
_APART = re.compile(r"(?<=\d)(?<![\^_]\d)\s+(?=\d+(?!\d|\s*/))")
_UNIT_BEFORE_NUMBER = re.compile(r"(?<=\d)\s*\\text\{[^{}]*\}\s*(?=\d)")
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
    for brace in BRACE.finditer(text):
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
    contents = [_SPACE_AT_END.sub("", text[start:end]).strip() for _, start, end in boxes[last:]]
    return ",".join(dict.fromkeys(BRACE.sub(lambda b: "{" if b["box"] else b[0], content) for content in contents))


def _are_parts(between: str) -> bool:
    is_short = len(between) <= _LONGEST_BETWEEN and "\n\n" not in between
    return is_short and bool(_SEPARATOR.search(between)) and bool(_BETWEEN.fullmatch(between))


def spelled_numbers(text: str) -> str:
    r"""Return ``text`` with its numbers as math-verify reads them: grouped, in e-notation, with repeating decimals.

    >>> spelled_numbers(r"12\,345, 1.5e-3, 0.1\overline{6}")
    '12345, 0.0015, \\frac{1}{6}'
    """
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], in_ascii(text))
    text = _FRACTION_SIGN.sub(lambda sign: r"\frac{{{}}}{{{}}}".format(*_parts_of(sign[0])), text)
    text = _SUPERSCRIPTS.sub(lambda power: f"^{{{in_ascii(unicodedata.normalize('NFKC', power[0]))}}}", text)
    text = without_groups(text)
    text = _EXPONENT.sub(lambda number: f"{Decimal(number[0]):f}", text)
    text = _SIGNED_POWER.sub(r"^{\1}", _TIMES_TEN.sub(r"\\times 10", text))
    text = _CUT_DECIMAL.sub(r"\1", _REPEATING.sub(_fraction, text))
    return _DOTTED_LIST.sub(lambda dots: f"{dots['digit']}{',' * bool(dots['digit'])}\\text{{dots}}", text)


def without_groups(text: str) -> str:
    r"""Return ``text`` without LaTeX's and Unicode's separators of thousands.

    >>> without_groups(r"12\,345 and 1{,}234"), without_groups("1, 234"), without_groups("1.234.567")
    ('12345 and 1234', '1, 234', '1234567')
    """
    return _DOTTED_GROUPS.sub(lambda number: number[0].replace(".", ""), _GROUPS.sub("", text))


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
    text = _SIGN.sub(lambda sign: _SIGNS[sign[0]], in_ascii(content.replace(r"\$", "$")))
    text = text.strip("*`\"' \n") if text[:1] in "'`\"" else text  # here, so that no quote is read as a prime
    for pattern, replacement in _MISREAD:
        text = re.sub(pattern, replacement, text)
    plain = "".join(c for c in text if unicodedata.category(c) != "Sc")
    plain = re.sub(r"\\text\s*\{\s*\}", "", _CURRENCY_WORD.sub("", plain))
    if plain != text:
        plain = re.sub(r"(?<=\d),(?=\d\d)", "", plain) if re.fullmatch(r"[-+\s]*[\d,]+(?:\.\d+)?\s*", plain) else plain
    text = spelled_numbers(plain).strip("*`\"' \n")
    if _SPACED_GROUPS.fullmatch(text):
        text = text.replace(" ", "")
    text = _BARE_ROOT.sub(r"\1{\2}", _SPACE.sub(" ", text[:-_NEAR] + _END.sub("", text[-_NEAR:])))
    if mixed := _MIXED.fullmatch(text):
        text = r"{}\frac{{{}}}{{{}}}".format(*mixed.groups())
    if set_of := _SET_OF.fullmatch(text):
        text = set_of[1]
    text = _UNIT_FRACTION.sub(r"\\text{\1/\3}", text)
    text = _FUNCTION.sub(r"\\\1 ", _APART.sub(",", text))
    return _UNIT_BEFORE_NUMBER.sub(",", _WORDS.sub(_as_text, text))


def _as_text(words: re.Match[str]) -> str:
    wrapper, text = words["wrapper"], words[0]
    if wrapper is None and text.startswith("\\") or wrapper in ("begin", "end", "mathbb", "mathcal", "overline"):
        return text
    if wrapper is not None:
        text = text[text.index("{") + 1 : -1]
        if text.strip(" ,") in ("and", "or") or (wrapper == "mathrm" and len(text) < 2):
            return words[0]
        return _wrapped(text, words)
    if text.isupper() and _is_product(words):
        return text
    parts = _AND_OR.split(text)
    return "".join(
        part if place % 2 or not part.strip() or _is_mathematics(part) else _wrapped(part, words if not place else None)
        for place, part in enumerate(parts)
    )


_BEFORE_ALONE = re.compile(r"(?:^|[\[,;:&]|\\\{)\s*\(?\s*$")
_AFTER_ALONE = re.compile(r"\s*\)?\s*(?:$|[\],;:&.]|\\\})")


def _is_product(capitals: re.Match[str]) -> bool:
    """Return whether capitals are factors of a formula: ``GM`` in ``GM/r``, but neither ``BCA`` alone nor ``5 KM``."""
    text, start = capitals.string, capitals.start()
    before = ("x" if start > _NEAR else "") + text[max(0, start - _NEAR) : start]
    after = text[capitals.end() : capitals.end() + _NEAR]
    is_unit = re.search(r"\d\s+$", before) is not None and " " not in capitals[0]
    is_alone = _BEFORE_ALONE.search(before) is not None and _AFTER_ALONE.match(after) is not None
    return not is_unit and not is_alone


def _wrapped(text: str, words: re.Match[str] | None) -> str:
    """Mark ``text`` as words: of a unit, which math-verify leaves out, or in brackets, which keep it."""
    before = "" if words is None else words.string[: words.start()].rstrip()[-4:]
    is_symbol = words is not None and words.string[words.end() : words.end() + 1] in ("_", "^")
    is_answer = not is_symbol and (not before or before[-1] in "([{,;:=&<>+" or before.endswith((" and", " or")))
    return rf"(\text{{{text}}})" if is_answer else rf"\text{{{text}}}"


def _is_mathematics(words: str) -> bool:
    """Return whether letters are a product, not words or a sequence: ``xy``, but not ``BCA`` and not ``no``.

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


_PLAIN_UNIT = (
    r"(?:[kcmn]?m|mi|ft|in|yd|[km]?g|lb|oz|m?s|min|hr?|m?L|k?J|[kM]?W|k?N|k?Pa|[kMG]?Hz|V|A|C|K|mol|[kMG]?eV|T|mph|rad)"
    r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d)|[²³])?"
)
_UNIT_AT_END = re.compile(
    r"\s*([-+]?\d[\d.,]*(?:\s*\\(?:times|cdot)\s*10\s*\^\s*(?:\{[-+]?\d+\}|\d))?)"
    rf"(?:(?:\s|~|\\[,;:! ])+{_PLAIN_UNIT}(?:\s*(?:/|\\cdot(?![A-Za-z])|\*)\s*{_PLAIN_UNIT})*"
    rf"|{_SPACES}\\(?:Omega|AA|mu\s*(?:{_WRAPPER}\w+\s*\}}|\w+)|(?:text|mathrm)\s*\{{\s*(?!\\?[ie]\s*\}})\\?\w+\s*\}}))\s*"
)
_BEFORE_ANSWER = re.compile(
    rf"\s*{_WRAPPER}[^{{}}]{{0,80}}(?:[:,]|\b(?:is|are|about|approximately|exactly))\s*\}}(?=.*\d)"
    r"|\s*[A-Za-z][A-Za-z' ]{1,80}?(?::|\b(?:is|are)\b)(?=.*\d)"
)
_PROBABILITY = re.compile(r"\s*(?:\\mathbb\s*\{?P\}?|\\?Pr?|E)\s*[(\[]([^=()\[\]]*)[)\]]\s*=")
_NAMED = re.compile(r"[^=]*=\s*(?=\\begin\s*\{[a-z]*matrix\})|\s*\\(?:det|dim|deg)\b[^=,&]*=(?!.*=)")
_EQUATION_WITH_UNIT = re.compile(
    rf"([^=]+=[^=]*[\d}}]){_SPACES}\\(?:text|mathrm)\s*\{{[^{{}}]*\}}(?:\s*\^\s*\{{?\d\}}?)?\s*"
)


def readings(content: str) -> list[str]:
    r"""Return the texts that an answer may stand for.

    2e-1 is 0.2, and in a formula with Euler's number it is 2e - 1. 5 million is 5,000,000, and 5 of the unit million.
    A choice with its value, (B) 42, is each of the two. What ``\pm`` joins are two values.
    """
    texts = [content, re.sub(r"(?<![\w.])(\d+)e(-\d)", r"\1 e\2", content), scaled(content)]
    starts = (pattern.match(content) for pattern in (_BEFORE_ANSWER, _PROBABILITY, _NAMED))
    texts += [content[start.end() :] for start in starts if start is not None]
    if quantity := _UNIT_AT_END.fullmatch(content) or _EQUATION_WITH_UNIT.fullmatch(content):
        texts.append(quantity[1])
    if content.count(r"\pm") == 1:
        signs = (("+", "-"), ("-", "+"))
        texts.append(",".join(content.replace(r"\pm", plus).replace(r"\mp", minus) for plus, minus in signs))
    return [*dict.fromkeys(text for text in (*choice_of(content), *texts) if text)]


def choice_of(content: str) -> tuple[str, str]:
    """Return the letter of a choice, and its value; empty text if there is none."""
    match = _CHOICE.fullmatch(content.strip())
    if match is None or not (match["named"] or match["close"]) or (match["value"] and not match["close"]):
        return "", ""
    value = match["value"] or ""
    return ("", "") if _LETTER.search(value) else (match["letter"], value)


def scaled(text: str) -> str:
    """Return ``text`` with the value of numbers such as 1.5 million."""
    if _SCALE.search(text) is None:
        return text
    return _SCALE.sub(
        lambda scale: f"{Decimal(scale['number']) * 10 ** _SCALE_WORDS[scale['word']]:f}{scale['open'] or ''}",
        without_groups(text),
    )


_STATED = [
    re.compile(r"\d_\s*\{?(\d+)"),
    re.compile(r"\b[bp]?mod\b\s*\{?\s*(\d+)"),
    re.compile(r"\b([ap])\.?\s?m\b", re.I),
]


def contradict(one: str, other: str) -> bool:
    """Return whether answers state other choices, bases, moduli, events or halves of the day.

    math-verify leaves these out. Two choices with values are the same if their values are.
    """
    letters = {choice_of(one)[0], choice_of(other)[0]} - {""}
    stated = [tuple({word.lower() for word in pattern.findall(text)} for text in (one, other)) for pattern in _STATED]
    event, other_event = _PROBABILITY.match(one), _PROBABILITY.match(other)
    if event and other_event:
        stated.append(({event[1]}, {other_event[1]}))
    return len(letters) == 2 or any(first and second and first != second for first, second in stated)
