"""GRPO with the standard deviation of the whole iteration instead of the group's (ScaleRL, arXiv 2510.13786)."""

import statistics

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards, divisor, less_group_mean
from miles.objective.registry import Term


class GrpoBatchStd(Estimator[AdvantageFlags]):
    """``A_i = (r_i - mean of its group) / (std + 1e-6)``, std over all differences of the iteration (2510.13786).

    This is ScaleRL's advantage. GRPO's own standard deviation raises groups that are nearly all right or wrong; here
    all are divided by the same number. It is the unbiased one, over the trajectories of the iteration. TRL takes that
    of the rewards instead. ``--normalize-advantages`` is over the tokens of a step, and subtracts a mean too.

    A group of one has a difference of 0 and counts in the spread. Equal rewards give exactly 0, and a sample of
    advantage 0 has no gradient.
    """

    name = "grpo_batch_std"
    summary = "the reward less its group's mean, over the standard deviation of the iteration"
    reads = ("normalize_advantages",)
    compares_groups = True  # a group of one is its own mean

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        text = "A = d / (std of d over the iteration), d = reward - mean of its prompt group"
        return [Term(text, __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Compare rewards within each group, and divide by one spread."""
        differences = []
        for rewards in samples.by_group().values():
            mean = statistics.mean(rewards.values())
            differences += [reward - mean for reward in rewards.values()]
        spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
        return [difference / divisor(spread, 1e-6) for difference in less_group_mean(samples, std=False)]
