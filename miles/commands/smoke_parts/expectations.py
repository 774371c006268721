"""Expectations of a run's metrics: ``eval/heldout/accuracy >= 0.9``, ``max(train/grad_norm) < 100``."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from miles.base.flags import count
from miles.base.input_error import InputError
from miles.base.one_line import one_line

_SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda values: values[-1],
    "first": lambda values: values[0],
    "min": min,
    "max": max,
    "mean": statistics.fmean,
}
_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_NAME = r"[^\s()<>=!]+"
_FORM = re.compile(rf"\s*(?:(\w+)\(\s*({_NAME})\s*\)|({_NAME}))\s*(>=|<=|==|!=|>|<)\s*({_NUMBER})\s*")


@dataclass(frozen=True)
class Expectation:
    """A bound on one number that the run logs: a metric's last, first, lowest, highest or mean value over the steps."""

    text: str
    summary: str
    metric: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str, where: str = "--expect") -> Expectation:
        """Read ``METRIC OP NUMBER`` or ``SUMMARY(METRIC) OP NUMBER``; without a summary it is the last value.

        Raises:
            InputError: The text has another form; the message begins with ``where``.
        """
        match = _FORM.fullmatch(text)
        if match is None:
            what_to_do = "write METRIC OP NUMBER, such as 'eval/heldout/accuracy >= 0.9'"
            raise InputError(f"{where} {one_line(text, 200)!r}: is not an expectation; {what_to_do}")
        summary, inside, alone, comparison, number = match.groups()
        if summary is not None and summary not in _SUMMARIES:
            what_to_do = f"give one of {', '.join(_SUMMARIES)}"
            raise InputError(f"{where} {one_line(text, 200)!r}: {summary} is not a summary; {what_to_do}")
        return cls(" ".join(text.split()), summary or "last", inside or alone, comparison, float(number))

    def fault(self, metrics: Mapping[str, Sequence[float]]) -> str | None:
        """Say why the run does not meet the expectation; None if it does.

        Args:
            metrics: The values of each metric, of the steps that logged it; NaN for values that are not finite.
        """
        values = metrics.get(self.metric, ())
        if not values:
            near = get_close_matches(self.metric, metrics, n=3)
            return f"the run logged no {self.metric}" + (f"; near: {', '.join(near)}" if near else "")
        bad = sum(map(math.isnan, values))
        if bad:
            return f"{self.metric} is not a finite number in {bad} of {count(len(values), 'step')}"
        value = _SUMMARIES[self.summary](values)
        if _COMPARISONS[self.comparison](value, self.bound):
            return None
        return f"{self.summary}({self.metric}) is {value:.6g}"


def read_expectations(path: Path) -> list[Expectation]:
    """Read a file with one expectation per line; empty lines and what follows ``#`` are skipped.

    Raises:
        InputError: The file cannot be read, or a line is not an expectation; the message names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--expect-file {path}: cannot be read ({error}); check the path") from error
    texts = [(number, line.split("#")[0]) for number, line in enumerate(lines, start=1)]
    return [Expectation.parse(text, f"{path}:{number}:") for number, text in texts if text.strip()]
