"""GRPO: the reward minus the mean of its prompt group, over the standard deviation of the group (arXiv 2402.03300)."""

from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards, less_group_mean
from miles.objective.registry import Term


@dataclass(frozen=True)
class GrpoFlags(AdvantageFlags):
    """grpo: how rewards are compared within a prompt group."""

    disable_grpo_std_normalization: bool = flag(
        False, "subtract the group's mean only, as Dr.GRPO does", needs="no --disable-rewards-normalization"
    )
    disable_rewards_normalization: bool = flag(False, "use the rewards as they are as advantages")


class Grpo(Estimator[GrpoFlags]):
    """``A_i = (r_i - mean(r)) / std(r)`` over the prompt group of trajectory i (2402.03300, outcome supervision).

    The standard deviation is the unbiased one, plus 1e-6. Dr.GRPO (2503.20783) does not divide by it:
    ``--disable-grpo-std-normalization``. A group of one, or of equal rewards, has advantages of exactly 0.
    """

    name = "grpo"
    summary = "the reward compared within its prompt group"
    reads = ("normalize_advantages", "disable_grpo_std_normalization", "disable_rewards_normalization")
    own_flags = GrpoFlags

    def smallest_group(self, flags: GrpoFlags) -> int:
        """Return 2: a group of one has no spread. Rewards that stay unchanged need no group."""
        return 1 if flags.disable_rewards_normalization else 2

    def formula(self, flags: GrpoFlags) -> list[Term]:
        """Return the formula of A."""
        centred = "reward - mean of its prompt group"
        if flags.disable_rewards_normalization:
            return [Term("A = reward", __name__)]
        if flags.disable_grpo_std_normalization:
            return [Term(f"A = {centred}", __name__)]
        return [Term(f"A = ({centred}) / std of its prompt group", __name__)]

    def sample_advantages(self, flags: GrpoFlags, samples: SampleRewards) -> list[float]:
        """Compare rewards within each group, unless they are used unchanged."""
        if flags.disable_rewards_normalization:
            return list(samples.rewards)
        return less_group_mean(samples, std=not flags.disable_grpo_std_normalization)
