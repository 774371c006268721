"""``--rm-type deepscaler``: equality of the boxed answer that follows the model's reasoning."""

from collections.abc import Sequence

from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.built_in.math import LIMIT, readable_label, score_answer
from miles.tasks.rewards.subprocess_call import in_parallel
from miles.types.sample import Prompt, Sample

_ENDS_OF_REASONING = ("</think>", "###Response")
_BOX = "\\boxed{"


class DeepScaler(Reward[None]):
    r"""1 if the last ``\boxed{}`` after the reasoning equals the label mathematically, else 0.

    Reasoning ends at the last ``</think>``, or at ``###Response``. A response that does not end its reasoning, or boxes
    no answer after it, scores 0. Equality is the same as for ``--rm-type math``.
    """

    name = "deepscaler"
    summary = "math, of the last box after the reasoning"
    data = "label: LaTeX or a number"
    limit = LIMIT

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        readable_label(prompt, self.name)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare boxes."""
        return in_parallel(_score, samples)


def _score(sample: Sample) -> float:
    return score_box(sample, boxed_answer(sample.response), "deepscaler")


def score_box(sample: Sample, answer: str | None, rm_type: str) -> float:
    """Score 1 if ``answer``, the content of a box, equals the label of ``sample``; None is no answer.

    Raises:
        ValueError: The label is not mathematics. ``rm_type`` names the reward in the message.
    """
    return 0.0 if answer is None else score_answer(sample, f"{_BOX}{answer}}}", rm_type)


def boxed_answer(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` after the reasoning, or None.

    >>> boxed_answer("<think>\\boxed{1}</think> it is \\boxed{\\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    for end in _ENDS_OF_REASONING:
        _, found, solution = response.rpartition(end)
        if found:
            return last_box(solution)
    return None


def last_box(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{}`` of ``text``; None if there is none, or it is cut off."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for index in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[start + len(_BOX) : index]
    return None  # cut off inside the box


REWARD = DeepScaler()
