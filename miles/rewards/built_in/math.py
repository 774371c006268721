"""``--rm-type math``: equality of mathematical expressions, by math-verify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from math_verify import parse, verify

from miles.rewards.reference import reference_text
from miles.rewards.subprocess_call import SubprocessCallTimeout, subprocess_call
from miles.sample import Sample

SECONDS = 10.0  # of wall time per sample; an ordinary one takes about ten milliseconds

_logger = logging.getLogger(__name__)
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are on


def math(samples: Sequence[Sample]) -> list[float]:
    r"""Score 1 if the answer found in the response equals the label mathematically, else 0.

    math-verify decides what the answer is (``\boxed{}`` first, then other LaTeX and plain expressions) and what is
    equal. A comparison that does not end within ``SECONDS`` is logged and scored 0: no equality was shown.
    Raises ``ValueError`` for a label that is not mathematics.
    """
    return [_score(s) for s in samples]


def _score(sample: Sample) -> float:
    label = reference_text(sample.prompt, "math")
    try:
        equal = subprocess_call(is_equal, label, sample.response, seconds=SECONDS)
    except SubprocessCallTimeout:
        _logger.warning(
            "--rm-type math: no verdict in %g s, scored 0: prompt %s, response ends %r",
            SECONDS,
            sample.prompt.source,
            sample.response[-80:],
        )
        return 0.0
    if equal is None:
        raise ValueError(
            f"--rm-type math: the label {label[:80]!r} of the prompt {sample.prompt.source} is not mathematics; write "
            f"LaTeX or a number there, or use --rm-type exact_match"
        )
    return float(equal)


def is_equal(label: str, response: str) -> bool | None:
    """Whether ``response`` gives the value of ``label``; None if the label cannot be read. May never return."""
    # A bare label such as x^2 is read as mathematics only inside LaTeX delimiters.
    marked = label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}"
    gold = _parse(marked)
    return bool(verify(gold, _parse(response), timeout_seconds=None)) if gold else None


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = parse(text, parsing_timeout=None)  # its timeouts do not stop C code; ``subprocess_call`` does
    return parsed
