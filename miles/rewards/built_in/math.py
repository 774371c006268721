"""``--rm-type math``: equality of mathematical expressions, by math-verify."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from miles.rewards.answer_text import with_plain_minus
from miles.rewards.base import Reward, Rewards
from miles.rewards.no_verdict import log_no_verdict
from miles.rewards.reference import reference_text
from miles.rewards.subprocess_call import SubprocessCallTimeout, SubprocessDied, in_parallel, subprocess_call
from miles.sample import Sample

SECONDS = 1.0  # of processor time per sample; an ordinary one takes about ten milliseconds
LIMIT = f"{SECONDS:g} s"
SLOW_IMPORTS = ("math_verify",)  # subprocess_call imports them before the time starts

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; ours are on


class Math(Reward):
    r"""1 if the answer found in the response equals the label mathematically, else 0.

    math-verify decides what the answer is (``\boxed{}`` first, then other LaTeX and plain expressions) and what is
    equal. A comparison that does not end within ``SECONDS``, or kills its process, is logged and scored 0: no equality
    was shown. A label that is not mathematics is an error.
    """

    name = "math"
    summary = "1 if the answer equals the label mathematically (math-verify)"
    data = "label: LaTeX or a number"
    limit = LIMIT

    def score(self, samples: Sequence[Sample], flags: Any) -> Rewards:
        """Compare mathematically."""
        return in_parallel(_score, samples)


def _score(sample: Sample) -> float:
    return score_answer(sample, sample.response, "math")


def score_answer(sample: Sample, answer: str, rm_type: str) -> float:
    """Score 1 if ``answer`` equals the label of ``sample``, else 0.

    Args:
        sample: The sample.
        answer: The text in which the answer is looked for.
        rm_type: The reward's name, for messages.

    Raises:
        ValueError: The label is not mathematics.
    """
    label = reference_text(sample.prompt, rm_type)
    try:
        equal = subprocess_call(is_equal, label, answer, seconds=SECONDS)
    except (SubprocessCallTimeout, SubprocessDied) as error:
        log_no_verdict(rm_type, sample, error)
        return 0.0
    if equal is None:
        raise ValueError(
            f"--rm-type {rm_type}: the label {label[:80]!r} of the prompt {sample.prompt.source} is not mathematics; "
            f"write LaTeX or a number there, or use --rm-type exact_match"
        )
    return float(equal)


def is_equal(label: str, response: str) -> bool | None:
    """Whether ``response`` gives the value of ``label``; None if the label cannot be read. May never return."""
    from math_verify import verify  # takes a second

    # A bare label such as x^2 is read as mathematics only inside LaTeX delimiters.
    marked = label if "\\boxed" in label or "$" in label else f"\\boxed{{{label}}}"
    try:
        gold = _parse(marked)
    except Exception:  # of several libraries
        return None
    if not gold:
        return None
    try:
        return bool(verify(gold, _parse(response), timeout_seconds=None))
    except Exception:  # RecursionError and MemoryError too, on what a model wrote: it shows no equality
        return False


def _parse(text: str) -> list[Any]:
    from math_verify import parse

    text = with_plain_minus(text)  # it reads other minus signs in LaTeX alone
    parsed: list[Any] = parse(text, parsing_timeout=None)  # its timeouts do not stop C code; ``subprocess_call`` does
    return parsed


REWARD = Math()
