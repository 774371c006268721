"""``--rm-type gemma_math``: equality of the boxed answer, after the thinking of a Gemma model if there is any."""

from collections.abc import Sequence

from miles.tasks.rewards.base import Reward, Rewards
from miles.tasks.rewards.built_in.deepscaler import last_box, score_box
from miles.tasks.rewards.built_in.math import LIMIT, readable_label
from miles.tasks.rewards.subprocess_call import in_parallel
from miles.types.sample import Prompt, Sample

_END_OF_THINKING = "<channel|>"


class GemmaMath(Reward[None]):
    r"""1 if the last ``\boxed{}`` after the thinking equals the label mathematically, else 0.

    Thinking ends at the last ``<channel|>``. Unlike ``--rm-type deepscaler``, a response without this mark is an answer
    as a whole. Equality is the same as for ``--rm-type math``.
    """

    name = "gemma_math"
    summary = "math, of the last box after the thinking of a Gemma model"
    data = "label: LaTeX or a number"
    limit = LIMIT

    def check_prompt(self, prompt: Prompt, flags: None) -> None:
        """Check the label."""
        readable_label(prompt, self.name)

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Compare boxes."""
        return in_parallel(_score, samples)


def _score(sample: Sample) -> float:
    return score_box(sample, last_box(sample.response.rpartition(_END_OF_THINKING)[2]), "gemma_math")


REWARD = GemmaMath()
