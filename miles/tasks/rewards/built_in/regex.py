"""``--rm-type regex``: whether a pattern is found in the answer."""

import re
from dataclasses import dataclass
from typing import Optional

from miles.base.flags import Errors, flag
from miles.base.text import one_line
from miles.tasks.rewards.answer_text import after_reasoning, reference_text
from miles.tasks.rewards.base import SubprocessReward
from miles.tasks.rewards.subprocess_call import subprocess_call
from miles.types.sample import Prompt, Sample

SECONDS = 1.0  # of processor time per answer: a pattern may take exponential time


@dataclass(frozen=True)
class RegexFlags:
    """regex: the flags of ``--rm-type regex``."""

    reward_regex: Optional[str] = flag(
        None,
        "pattern of --rm-type regex, as Python's re reads it; default: the label of each prompt is its pattern",
        has_lines=True,
    )


class Regex(SubprocessReward[RegexFlags]):
    r"""1 if the pattern is found in what follows the reasoning, else 0.

    The pattern may be found anywhere: begin it with ``\A\s*`` and end it with ``\s*\Z`` to ask for the whole answer. A
    search that takes more than ``SECONDS`` is logged and scored 0.
    """

    name = "regex"
    summary = "1 if a pattern is found in the answer"
    data = "label: a pattern, unless --reward-regex is given"
    instead_of_label = "reward_regex"
    limit = f"{SECONDS:g} s"
    own_flags = RegexFlags

    def check(self, flags: RegexFlags, errors: Errors) -> None:
        """Check that the pattern is one."""
        if flags.reward_regex is not None:
            try:
                re.compile(flags.reward_regex)
            except (re.error, RecursionError, OverflowError) as error:
                errors.refuse("reward_regex", flags.reward_regex, f"is no pattern ({error})", "correct it")

    def check_prompt(self, prompt: Prompt, flags: RegexFlags) -> None:
        """Check that a label is a pattern."""
        if flags.reward_regex is None and matches(reference_text(prompt, "regex"), "") is None:
            raise _no_pattern(prompt)

    def judge(self, sample: Sample, flags: RegexFlags) -> float:
        """Search for the pattern."""
        common = flags.reward_regex
        pattern = reference_text(sample.prompt, "regex") if common is None else common
        verdict = subprocess_call(matches, pattern, after_reasoning(sample.response), seconds=SECONDS)
        if verdict is None:
            raise _no_pattern(sample.prompt)
        return float(verdict)


def _no_pattern(prompt: Prompt) -> ValueError:
    return ValueError(
        f"--rm-type regex: the label {one_line(str(prompt.label), 80)!r} of the prompt {prompt.source} is no pattern; "
        f"correct the row, or give one pattern for all with --reward-regex"
    )


def matches(pattern: str, text: str) -> bool | None:
    """Return whether the pattern is found; None if it is no pattern. May take exponential time."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return None
    return compiled.search(text) is not None
