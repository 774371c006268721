"""``--rm-type zero``."""

from collections.abc import Sequence

from miles.tasks.rewards.base import Reward, Rewards
from miles.types.sample import Sample


class Zero(Reward[None]):
    """No reward: for runs that learn from a teacher alone (``--use-opd``)."""

    name = "zero"
    summary = "0, for runs that learn from a teacher alone (--use-opd)"
    needs_label = False

    def score(self, samples: Sequence[Sample], flags: None) -> Rewards:
        """Return 0 for every sample."""
        return zero(samples)


def zero(samples: Sequence[Sample]) -> list[float]:
    """Return 0 for every sample. Scripts that distil a teacher name a function instead of a reward."""
    return [0.0] * len(samples)
