"""Text from outside as a part of a message: short, on one line or a few, without control characters."""

import re
import sys
from pathlib import Path

_COLOR = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST_TEXT = 1_000_000  # the middle of a longer one is not read


def one_line(text: str, limit: int) -> str:
    r"""Return the start of ``text``, at most ``limit`` characters. Unprintable characters become spaces.

    >>> one_line("a\nlong text", 7)
    'a long…'
    """
    start = "".join(c if c.isprintable() else " " for c in text[: limit + 1])
    return start if len(text) <= limit else start[: limit - 1] + "…"


def few_lines(text: str, *, lines: int = 200, limit: int = 500) -> str:
    r"""Return the lines of ``text``, such as a traceback, each as ``one_line`` does; those in the middle are left out.

    Args:
        text: The text. Colors of a terminal are taken out of it.
        lines: How many lines are kept, half of them from the end.
        limit: The longest line.

    >>> few_lines("a\tb\n\x1b[31mc\x1b[0m\nd\ne", lines=2)
    'a b\n… 2 lines are left out …\ne'
    """
    if len(text) > _LONGEST_TEXT:
        end = text[-_LONGEST_TEXT // 2 :].partition("\n")[2]  # whole lines; empty if it is one
        text = f"{text[: _LONGEST_TEXT // 2]}\n{end}"
    every = _COLOR.sub("", text).splitlines()
    if len(every) > lines:
        head, tail = lines - lines // 2, lines // 2
        every[head:-tail] = [f"… {len(every) - lines} lines are left out …"]
    return "\n".join(one_line(line, limit) for line in every)


def program() -> str:
    """Return the command that the user typed, which begins messages: ``miles train``, or the name of a script."""
    path = Path(sys.argv[0])
    is_miles = path.name == "miles" or path.parts[-2:] == ("miles", "__main__.py")
    if is_miles and sys.argv[1:]:
        return f"miles {one_line(sys.argv[1], 80)}"
    return path.name if path.suffix == ".py" and path.name != "__main__.py" else "miles train"


def tell(message: str) -> None:
    """Print the command's name and a message on standard error, at once."""
    print(f"{program()}: {message}", file=sys.stderr, flush=True)


def name_and_words(error: BaseException) -> str:
    """Return the type and the words of an error whose ``__str__`` may be a user's and may raise.

    >>> name_and_words(KeyError("x")), name_and_words(StopIteration())
    ("KeyError: 'x'", 'StopIteration')
    """
    words = words_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def words_of(error: BaseException) -> str:
    """Return ``str(error)``, or that it raises."""
    try:
        return str(error)
    except BaseException as fault:  # the user's, like the error
        return f"(its str raises {type(fault).__name__})"


# The error about something that the user has given: a flag, a file, a row.


class InputError(ValueError):
    """Report a fault in flags, data or files in one sentence. The program ends with exit code 2."""
