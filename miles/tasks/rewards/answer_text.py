"""The part of a response that answers. Every search here takes linear time, whatever a model writes."""

import re
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from itertools import product
from numbers import Integral, Real
from typing import Any

from miles.base import strict_json
from miles.types.sample import Prompt

END_OF_REASONING = "</think>"
_OPEN, _CLOSE = "<answer>", "</answer>"
_OPENING = re.compile(  # in an item of a list too; with a mark, also after words
    r"(?:\s|[-*+]\s|\d{1,9}[.)]\s)*+(?P<words>[^`]++(?=`{3,}[\s{.]*+\w))?(?P<fence>`{3,}+|~{3,}+)(?P<info>[^`]*)$"
)
_INFO = re.compile(r"[\w{.]")  # begins right behind the fence; words after a space are the response's
_ASCII = {ord("\N{MINUS SIGN}"): "-", ord("\N{SMALL HYPHEN-MINUS}"): "-"}
_ASCII |= {0xFEE0 + code: chr(code) for code in range(ord("!"), ord("~") + 1)}  # full width
_DIGIT = re.compile(r"(?![0-9])\d")


def after_reasoning(response: str) -> str:
    """Return what follows the last ``</think>``; all of a response without one.

    >>> after_reasoning("<think>A or B?</think> B")
    ' B'
    """
    return response.rpartition(END_OF_REASONING)[2]


def tagged_answer(response: str) -> str | None:
    """Return the content of the last ``<answer>…</answer>`` after the reasoning; None if there is none.

    >>> tagged_answer("<answer>3</answer> no, <answer> 4 </answer>")
    ' 4 '
    """
    before, closed, _ = after_reasoning(response).rpartition(_CLOSE)
    _, opened, answer = before.rpartition(_OPEN)
    return answer if closed and opened else None


def final_answer(response: str) -> str:
    """Return the tagged answer, else all that follows the reasoning, without white space around it."""
    tagged = tagged_answer(response)
    return (after_reasoning(response) if tagged is None else tagged).strip()


def in_ascii(text: str) -> str:
    """Return ``text`` with Unicode's minus signs, digits and full-width forms as ASCII has them.

    >>> in_ascii("\N{MINUS SIGN}\N{ARABIC-INDIC DIGIT FOUR}\N{FULLWIDTH PERCENT SIGN}")
    '-4%'
    """
    return _DIGIT.sub(lambda digit: str(int(digit[0])), text.translate(_ASCII))


def last_code_block(response: str, *languages: str) -> str | None:
    r"""Return the content of a block of code after the reasoning; None if there is none.

    It is the last block that is marked with one of ``languages``, else the last without a mark. A block that the
    response does not close counts if no other does. Fences follow CommonMark, in items of lists too.

    Args:
        response: The response.
        languages: The names that an opening fence may have, in lower case; a version may follow (``python3``).

    >>> last_code_block("- so\n  ```python\n  print(1)\n  ```\n```\n1\n```\n", "python")
    'print(1)\n'
    """
    blocks: dict[tuple[bool, bool], str] = {}  # the last one, by whether it is marked, and closed
    opening: re.Match[str] | None = None
    language, content, indent = "", "", 0
    for line in [*after_reasoning(response).split("\n"), None]:
        text = (line or "").lstrip()
        deeper = len(line or "") - len(text) - indent
        begins = None if line is None else _OPENING.match(line)
        if opening is None or (begins and deeper < 4 and _is_another(begins, opening["fence"])):
            if opening := begins:
                indent = len(line or "") - len(text) if begins["words"] else begins.start("fence")
                language, content = _language(begins["info"]), ""
            continue
        if line is None:
            content = re.split(rf"(?m)(?<=\S){opening['fence']}[ \t]*$", content, maxsplit=1)[0]  # a fence after code
        if line is None or (deeper < 4 and _closes(text.rstrip(), opening["fence"])):
            if not language or language in languages:
                blocks[bool(language), line is not None] = content
            opening = None
        else:
            content += (line[indent:] if deeper > 0 else text) + "\n"
    return next((blocks[kind] for kind in product((True, False), repeat=2) if kind in blocks), None)


def _language(info: str) -> str:
    """Return the name in the info of a fence, such as ``Python3 title=x`` or ``{.python}``, without a version."""
    return re.split(r"[\s:,{}]", info.strip(" \t\r{."))[0].lower().rstrip("0123456789.")


def _is_another(begins: re.Match[str], fence: str) -> bool:
    """Return whether a fence begins the next block though the block of ``fence`` was not closed."""
    return not begins["words"] and bool(_INFO.match(begins["info"])) and begins["fence"].startswith(fence)


def _closes(text: str, fence: str) -> bool:
    """Return whether a line closes a block; words may follow, as in ``` This works."""
    return text.startswith(fence) and not _INFO.match(text.lstrip(fence[0]))


# The reference answer of a prompt, as the built-in rewards want it.


def plain_number(number: float | Real | Decimal) -> str:
    """Return the shortest plain decimal that is ``number`` at its own width.

    >>> plain_number(1e-7), plain_number(1e16), plain_number(42.0), plain_number(Decimal("18.90"))
    ('0.0000001', '10000000000000000', '42', '18.9')
    """
    if isinstance(number, Integral):
        return str(int(number))
    text = f"{Decimal(str(number)):f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def reference_text(prompt: Prompt, rm_type: str) -> str:
    """Return the prompt's label as stripped text; a number is its ``plain_number``.

    Raises ``ValueError`` for a label that is missing, empty, or neither text nor number.
    """
    label = prompt.label
    if label is None:
        raise ValueError(
            f"--rm-type {rm_type}: the prompt {prompt.source} has no label to compare with; name the column of the "
            f"reference answers with --label-key"
        )
    if isinstance(label, bool) or not isinstance(label, str | Real | Decimal) or not str(label).strip():
        raise ValueError(
            f"--rm-type {rm_type}: the label of the prompt {prompt.source} is {label!r}; it must be text or a number: "
            f"name another column with --label-key, or correct the row"
        )
    return label.strip() if isinstance(label, str) else plain_number(label)


def reference_texts(prompt: Prompt, rm_type: str) -> list[str]:
    """Return the labels of a prompt: its label, or each of a list of alternatives, as ``reference_text`` gives them.

    Raises ``ValueError`` for a label that is missing, empty, or neither text nor number.
    """
    alternatives = prompt.label if isinstance(prompt.label, list) and prompt.label else [prompt.label]
    return [reference_text(replace(prompt, label=label), rm_type) for label in alternatives]


def reference_object(prompt: Prompt, rm_type: str, *keys: str) -> dict[str, Any]:
    """Return the object with one of ``keys`` that the prompt's metadata or label holds; a label may be its JSON text.

    Raises:
        ValueError: Neither holds one.
    """
    label = prompt.label
    if isinstance(label, str):
        with suppress(ValueError):
            label = strict_json.loads(label)
    for candidate in (prompt.metadata, label):
        if isinstance(candidate, dict) and any(key in candidate for key in keys):
            return candidate
    raise ValueError(
        f"--rm-type {rm_type}: the prompt {prompt.source} has no {' or '.join(keys)} in its metadata or label; name "
        f"their columns with --metadata-key or --label-key"
    )
