"""RLOO: the reward minus the mean of the others in its group (REINFORCE leave-one-out, arXiv 2402.14740)."""

import statistics

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


class Rloo(Estimator[AdvantageFlags]):
    """``R_i - mean of R_j, j != i``: the mean of a group without its own trajectory is an unbiased baseline."""

    name = "rloo"
    summary = "the reward minus the mean of the others in its group (leave-one-out)"
    reads = ("normalize_advantages",)
    compares_groups = True  # a group of one has no others

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [Term("A = reward - mean of the other rewards of its prompt group", __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Subtract from each trajectory's reward the mean of the others'.

        Computed as ``n / (n - 1) (R_i - mean of all)``, which is the same and exactly 0 for equal rewards. A sample
        that was rewarded apart from its trajectory keeps the difference.
        """
        groups = samples.by_group()
        means = {group: statistics.mean(rewards.values()) for group, rewards in groups.items()}
        advantages = []
        for reward, group, trajectory in zip(
            samples.rewards, samples.group_indices, samples.trajectory_ids, strict=True
        ):
            n = len(groups[group])
            scale = n / (n - 1) if n > 1 else 0.0
            of_trajectory = groups[group][trajectory]
            advantages.append((reward - of_trajectory) + scale * (of_trajectory - means[group]))
        return advantages
