"""``--rm-type gemma_math``: equality of the boxed answer, after the thinking of a Gemma model if there is any."""

from miles.tasks.rewards.built_in.deepscaler import in_box, last_box
from miles.tasks.rewards.built_in.math import ComparedAsMathematics

_END_OF_THINKING = "<channel|>"


class GemmaMath(ComparedAsMathematics):
    r"""1 if the last ``\boxed{}`` after the thinking equals the label mathematically, else 0.

    Thinking ends at the last ``<channel|>``. Unlike ``--rm-type deepscaler``, a response without this mark is an answer
    as a whole. Equality is the same as for ``--rm-type math``.
    """

    name = "gemma_math"
    summary = "math, of the last box after the thinking of a Gemma model"

    def answer(self, response: str) -> str | None:
        """Return the last box after the thinking."""
        return in_box(last_box(response.rpartition(_END_OF_THINKING)[2]))
