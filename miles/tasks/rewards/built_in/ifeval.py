"""``--rm-type ifeval``: whether an answer follows instructions that a program can check (IFEval, arXiv 2311.07911)."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from miles.base.flags import flag
from miles.base.text import one_line
from miles.tasks.rewards.answer_text import after_reasoning, reference_object
from miles.tasks.rewards.base import SubprocessReward
from miles.tasks.rewards.subprocess_call import subprocess_call
from miles.types.sample import Prompt, Sample

SLOW_IMPORTS = ("if_verifiable.ifeval",)  # subprocess_call imports them before the time starts
SECONDS = 2.0  # of processor time per answer: the first guess of a language takes one


@dataclass(frozen=True)
class IfevalFlags:
    """ifeval: the flags of ``--rm-type ifeval``."""

    ifeval_share: bool = flag(
        False, "reward of --rm-type ifeval: the share of instructions that are followed, not 1 for all of them"
    )
    ifeval_loose: bool = flag(
        False, "--rm-type ifeval accepts an answer that follows without its first or last line, or without asterisks"
    )


class Ifeval(SubprocessReward[IfevalFlags]):
    """1 if the answer follows all instructions of its prompt, else 0; the share of them with ``--ifeval-share``.

    The package if-verifiable checks what follows the reasoning: 25 kinds of instructions, from google/IFEval, whose
    columns ``instruction_id_list`` and ``kwargs`` the metadata or the label holds. An unknown kind, or other arguments
    than it takes, are an error of the row. Two kinds (the number of sentences, words in capitals) need the NLTK data
    ``punkt_tab``, which the package does not bring. Languages are guessed with a fixed seed. An empty answer scores 0.
    """

    name = "ifeval"
    summary = "1 if all instructions of the prompt are followed (if-verifiable)"
    data = "metadata or label: `instruction_id_list` and `kwargs`"
    needs_label = False
    limit = f"{SECONDS:g} s"
    libraries = ("if_verifiable with pip install if-verifiable==0.1.2",)
    own_flags = IfevalFlags

    def check_prompt(self, prompt: Prompt, flags: IfevalFlags) -> None:
        """Check that the row has instructions."""
        _instructions(prompt)

    def judge(self, sample: Sample, flags: IfevalFlags) -> float:
        """Check the instructions."""
        kinds, arguments = _instructions(sample.prompt)
        answer = after_reasoning(sample.response)
        share, fault = subprocess_call(
            followed_share, answer, sample.prompt.text, kinds, arguments, flags.ifeval_loose, seconds=SECONDS
        )
        if fault is not None:
            raise _refused(sample.prompt, fault)
        return float(share if flags.ifeval_share else share == 1.0)


def followed_share(
    answer: str, prompt: str, kinds: list[str], arguments: list[dict[str, Any]], loose: bool
) -> tuple[float, str | None]:
    """Return the share of instructions that are followed, and the fault of the row."""
    from if_verifiable.common import evaluate_instructions
    from if_verifiable.ifeval import INSTRUCTION_DICT
    from langdetect import DetectorFactory

    DetectorFactory.seed = 0
    try:
        _, scores = evaluate_instructions(answer, kinds, arguments, prompt, INSTRUCTION_DICT)
    except LookupError as error:
        if "punkt" not in str(error):
            raise
        return 0.0, "it needs NLTK's data punkt_tab: run python -m nltk.downloader punkt_tab"
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        return 0.0, one_line(f"{type(error).__name__}: {error}", 200)
    return scores.partial_loose if loose else scores.partial_strict, None


def arguments_of_instructions() -> dict[str, list[str]]:
    """Return the names of the arguments that each kind of instruction takes."""
    from if_verifiable.ifeval import INSTRUCTION_DICT

    return {kind: list(instruction(kind).get_instruction_args_keys()) for kind, instruction in INSTRUCTION_DICT.items()}


@cache
def _known() -> dict[str, list[str]] | None:
    """Return the same, from a process that imports the package; None if it is not installed here."""
    if find_spec("if_verifiable") is None:
        return None
    known: dict[str, list[str]] = subprocess_call(arguments_of_instructions, seconds=10 * SECONDS)
    return known


def _instructions(prompt: Prompt) -> tuple[list[str], list[dict[str, Any]]]:
    row = reference_object(prompt, "ifeval", "instruction_id_list")
    kinds, arguments = row["instruction_id_list"], row.get("kwargs")
    if not isinstance(kinds, list) or not kinds or not isinstance(arguments, list) or len(arguments) != len(kinds):
        raise _refused(prompt, "instruction_id_list and kwargs must be lists of one length, not empty")
    arguments = [{} if values is None else values for values in arguments]  # as Arrow has an object without keys
    if not all(isinstance(kind, str) for kind in kinds) or not all(isinstance(values, dict) for values in arguments):
        raise _refused(prompt, "instruction_id_list must hold names, and kwargs an object for each")
    if (known := _known()) is None:
        return kinds, arguments
    for kind, values in zip(kinds, arguments, strict=True):
        if kind not in known:
            raise _refused(prompt, f"no instruction is named {one_line(kind, 80)}")
        if missing := [name for name in known[kind] if values.get(name) is None]:
            raise _refused(prompt, f"{kind} lacks {' and '.join(missing)}, which the package would draw at random")
    return kinds, arguments


def _refused(prompt: Prompt, fault: str) -> ValueError:
    return ValueError(
        f"--rm-type ifeval: the instructions of the prompt {prompt.source} cannot be checked ({fault}); correct "
        f"the row, or leave it out"
    )
