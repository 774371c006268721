"""``--rm-type dapo``: mathematics as DAPO scores it (arXiv 2503.14476), 1 or -1."""

import re
from collections.abc import Sequence

from miles.tasks.rewards.answer_text import in_ascii, reference_text
from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.built_in.deepscaler import last_box
from miles.types.sample import Prompt, Sample

END = 300  # characters at the end of a response that are searched for the answer
# The value may begin on a later line, and stops at the end of its line. ``[^\S\n]`` is white space but a line break.
_ANSWER = re.compile(r"answer[^\S\n]*:[\s*]*([^\n]+)", re.IGNORECASE)
_FORMULA = re.compile(r"(?<!\\)\$+([^$]+)(?<!\\)\$+|\\\((.+?)\\\)")
_WRAPPERS = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_SPACES = re.compile(r"\\[!,;: ()\[\]]|\s|~|\\?\$|\\left|\\right")
_SET_ASIDE = re.compile(r"\^\{?\\circ\}?|\\%|%|\"")
_METRES_OR_ORDINAL = re.compile(r"\\text\s*\{\s*m\s*\}(?:\^\{?[23]\}?)?|\\mathrm\s*\{\s*th\s*\}")
_SHORT = re.compile(r"\\frac([0-9a-z])(?:([0-9a-z])|(?=\{))|\\sqrt([0-9a-z])")  # \frac12 is \frac{1}{2}
_UNITS = re.compile(  # that the authors' code sets aside
    r"(?<=[0-9}])(?:square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm"
    r"|gm|pounds|meters|meals|edges|students|childrentickets|multiples)+(?:\^\{?[23]\}?)?$"
)
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WHOLE = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")


class Dapo(Reward[None]):
    r"""1 if the answer is the label, else -1: R(y', y) of equation 7 in the paper.

    The answer is what follows ``Answer:`` on the last line that has it, within the last 300 characters, as the paper's
    prompt asks for ("Answer: $Answer"); if nothing follows on that line, the next line that is not blank. If it has one
    formula, this is the answer. Delimiters, dollar signs, a box, a left-hand side (``x =``), text and space commands,
    thousands separators, ``%``, degree signs, quotation marks and the authors' list of English units are set aside;
    then the texts must be the same. The labels of DAPO-Math-17k are whole numbers, for which this is equality. Other
    words of an answer count, so ``5 apples`` is not ``5``.
    """

    name = "dapo"
    summary = "1 if the line 'Answer: …' at the end gives the label, else -1"
    data = "label: text or a number"

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        _label(prompt)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare the last answer line."""
        return [1.0 if _is_right(sample) else -1.0 for sample in samples]


def _is_right(sample: Sample) -> bool:
    label = _label(sample.prompt)
    answers = _ANSWER.findall(sample.response[-END:])
    return bool(answers) and plain_value(answers[-1]) == label


def _label(prompt: Prompt) -> str:
    text = reference_text(prompt, "dapo")
    if label := plain_value(text):
        return label
    raise ValueError(
        f"--rm-type dapo: the label {text[:80]!r} of the prompt {prompt.source} states no value; correct the row"
    )


def plain_value(text: str) -> str:
    r"""Return the value that a line states, without what DAPO sets aside.

    >>> plain_value(r"$x = \boxed{1,234}$.")
    '1234'
    """
    text = in_ascii(text).replace("{,}", ",")
    formulas = list(_FORMULA.finditer(text))
    if len(formulas) == 1 and "=" not in _FORMULA.sub("", text):
        text = formulas[0][1] or formulas[0][2]
    boxed = last_box(text)
    value = (text if boxed is None else boxed).rpartition("=")[2]
    value = _SET_ASIDE.sub("", _SPACES.sub("", _WRAPPERS.sub(r"\1", _METRES_OR_ORDINAL.sub("", value))))
    value = value.replace("dfrac", "frac").replace("tfrac", "frac").strip("*").removesuffix(".").strip("*")
    value = _UNITS.sub("", _SHORT.sub(_written_out, value))
    if _THOUSANDS.fullmatch(value):
        value = value.replace(",", "")
    whole = _WHOLE.fullmatch(value)
    return value if whole is None else whole[1].removeprefix("+") + whole[2]


def _written_out(short: re.Match[str]) -> str:
    top, bottom, root = short.groups()
    return rf"\sqrt{{{root}}}" if root else rf"\frac{{{top}}}" + (f"{{{bottom}}}" if bottom else "")
