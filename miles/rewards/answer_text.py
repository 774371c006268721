"""The part of a response that answers. Every search here takes linear time, whatever a model writes."""

from __future__ import annotations

END_OF_REASONING = "</think>"
_OPEN, _CLOSE = "<answer>", "</answer>"
_FENCE = "```"
_MINUS_SIGNS = str.maketrans(dict.fromkeys("\N{MINUS SIGN}\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}", "-"))


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


def with_plain_minus(text: str) -> str:
    """Return ``text`` with each of Unicode's minus signs as the ``-`` of ASCII, which readers of numbers expect."""
    return text.translate(_MINUS_SIGNS)


def last_code_block(response: str, *languages: str) -> str | None:
    r"""Return the content of the last closed block of code after the reasoning; None if there is none.

    Args:
        response: The response.
        languages: The names that an opening fence may have, in lower case; a block without a name counts too.

    >>> last_code_block("so\n```python\nprint(1)\n```\n", "python")
    'print(1)\n'
    """
    found: str | None = None
    block: list[str] | None = None
    is_wanted = False
    for line in after_reasoning(response).splitlines(keepends=True):
        fence = line.strip()
        if block is None:
            if fence.startswith(_FENCE):
                language = fence.removeprefix(_FENCE).strip().lower()
                block, is_wanted = [], not language or language in languages
        elif fence == _FENCE:
            if is_wanted:
                found = "".join(block)
            block = None
        else:
            block.append(line)
    return found
