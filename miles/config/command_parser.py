"""Read the flags of the small commands: no value is too large or too long, or garbles a message."""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from miles.base.flags import (
    LONGEST_MESSAGE,
    LONGEST_PATH_IN_ERROR,
    LONGEST_VALUE,
    PATH_METAVARS,
    fault_of_path,
    fault_of_size,
    fault_of_text,
    flag_name,
)
from miles.base.text import one_line
from miles.config.suggest import suggestion

SWITCH = "is a switch and takes no value; give it alone, or leave it out"

# argparse's messages -> flag, value, rule and what to do
_REPHRASED = (
    (r"^argument ", ""),
    (r"""^(\S+): invalid int value: (['"])(.*)\2$""", r"\1 \3: must be a whole number; correct the value"),
    (r"""^(\S+): invalid float value: (['"])(.*)\2$""", r"\1 \3: must be a number; correct the value"),
    (
        r"""^(\S+): invalid whole_numbers value: (['"])(.*)\2$""",
        r"\1 \3: must be a list of whole numbers; write 1,1 or [0]*3+[1]*5",
    ),
    (r"""^(\S+): invalid choice: (['"])(.*)\2 \(choose from (.*)\)$""", r"\1 \3: no such choice; give one of \4"),
    (r"""^(\S+): ignored explicit argument (['"])(.*)\2$""", rf"\1=\3: {SWITCH}"),
    (r"^(\S+): expected .*$", r"\1: has no value; give one after it, or as \1=VALUE if it starts with a minus"),
)


def rephrased(message: str) -> str:
    """Return a message of argparse as flag, value, rule and what to do."""
    message = re.sub(rf"'([^']{{{LONGEST_VALUE}}})[^']*'", r"'\1…'", message)
    for pattern, sentence in _REPHRASED:
        message = re.sub(pattern, sentence, message)
    return message


class CommandParser(argparse.ArgumentParser):
    """Parse as argparse does, and refuse numbers that are too large and paths that no file system takes."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the words; one that belongs to no flag and no argument ends the process with status 2."""
        result, rest = self.parse_known_args(args, namespace)
        self._refuse([self._refusal(word) for word in rest])
        return result

    def _refusal(self, word: str) -> str:
        flag = one_line(word.partition("=")[0], LONGEST_VALUE)
        if word.startswith("-"):
            return f"{flag}: no such flag; {suggestion(flag, self._option_string_actions)}"
        return f"{one_line(word, LONGEST_VALUE)}: is a word too many; put a value that has spaces in quotes, or drop it"

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Convert the words of one argument; ``Path`` would read an empty one as the current folder."""
        is_text = not action.option_strings and action.metavar not in PATH_METAVARS  # such as a prompt
        if "" in arg_strings and not is_text:
            what_to_do = f"give one, or drop {action.option_strings[-1]}" if action.option_strings else "give one"
            raise argparse.ArgumentError(action, f"the value is empty; {what_to_do}")
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse, then check the values; a fault ends the process with status 2."""
        result, rest = super().parse_known_args(args, namespace)
        faults = []
        for action in self._actions:
            for value in _values(getattr(result, action.dest, None)):
                fault = _fault(action, value)
                if fault is not None:
                    name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
                    text = f"{value:g}" if isinstance(value, float) else str(value)
                    faults.append(f"{name} {one_line(text, LONGEST_PATH_IN_ERROR)}: {fault}")
        self._refuse(faults)
        return result, rest

    def refuse_below_one(self, **numbers: int | None) -> None:
        """End with an error about every flag whose number is below 1; None is one that is not set."""
        low = ((flag_name(name), number) for name, number in numbers.items() if number is not None and number < 1)
        self._refuse([f"{name} {number}: must be at least 1; give 1 or more" for name, number in low])

    def _refuse(self, faults: list[str]) -> None:
        if faults:
            self.error("\n".join(faults))

    def error(self, message: str) -> NoReturn:
        """Print a message, each of its lines short and without control characters, and exit with status 2."""
        if message.startswith("argument "):  # argparse's own
            message = rephrased(message)
        super().error("\n".join(one_line(line, LONGEST_MESSAGE) for line in message.split("\n")))


def _values(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)


def _fault(action: argparse.Action, value: Any) -> str | None:
    """Return the rule that a value breaks, and what to do; None if it breaks none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        rule = fault_of_size(action.dest, value)
        return None if rule is None else f"{rule}; give a number nearer to 0"
    if not isinstance(value, Path) and not (isinstance(value, str) and action.metavar in PATH_METAVARS):
        return None
    if (rule := fault_of_text(str(value), has_lines=False)) is not None:
        return f"{rule}; correct the path"
    rule = fault_of_path(str(value))
    return None if rule is None else f"{rule}; give a shorter one"
