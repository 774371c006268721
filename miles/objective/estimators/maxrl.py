"""MaxRL: the reward less its group's mean, over that mean (maximum likelihood RL, arXiv 2602.02710)."""

import statistics

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


class MaxRl(Estimator[AdvantageFlags]):
    """``A_i = (r_i - mean(r)) / mean(r)`` if the group has a success, else 0 (2602.02710, Algorithm 1).

    With rewards of 0 and 1, K of N right, that is ``1{K > 0} (r_i / K - 1 / N) N``. Its expected gradient is the
    gradient of ``-sum of (1 - p)^k / k for k < N``, which is log p as N grows: rare successes weigh more than under
    GRPO. For other rewards, which must not be negative, the formula is the same, and the likelihood is not defined.

    A group of one, a group of equal rewards, and a group without a success have advantages of exactly 0, and a sample
    of advantage 0 has no gradient.
    """

    name = "maxrl"
    summary = "the reward less its group's mean, over that mean; rewards of 0 and 1"
    reads = ("normalize_advantages",)
    compares_groups = True  # a group of one is its own mean

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [Term("A = (reward - mean of its prompt group) / that mean, 0 if the mean is 0", __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Compare rewards within each group.

        Raises:
            ValueError: If a reward is negative: the mean would not be a rate of success.
        """
        for reward, group in zip(samples.rewards, samples.group_indices, strict=True):
            if reward < 0:
                raise ValueError(
                    f"--advantage-estimator {self.name}: reward {reward:g} in prompt group {group}; it divides by the "
                    "group's mean, so rewards must be 0 or more; give 0 and 1, or use --advantage-estimator grpo"
                )
        means = {group: statistics.mean(rewards.values()) for group, rewards in samples.by_group().items()}
        pairs = zip(samples.rewards, samples.group_indices, strict=True)
        return [(reward - means[group]) / means[group] if means[group] > 0 else 0.0 for reward, group in pairs]
