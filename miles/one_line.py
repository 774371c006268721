"""Text from outside as a part of a message: short, on one line, without control characters."""

from __future__ import annotations


def one_line(text: str, limit: int) -> str:
    r"""Return the start of ``text``, at most ``limit`` characters. Unprintable characters become spaces.

    >>> one_line("a\nlong text", 7)
    'a long…'
    """
    start = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return start if len(text) <= limit else start[: limit - 1] + "…"


def name_and_words(error: BaseException) -> str:
    """Return the type and the words of an error whose ``__str__`` may be a user's and may raise.

    >>> name_and_words(KeyError("x")), name_and_words(StopIteration())
    ("KeyError: 'x'", 'StopIteration')
    """
    try:
        words = str(error)
    except Exception as fault:
        words = f"(its str raises {type(fault).__name__})"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
