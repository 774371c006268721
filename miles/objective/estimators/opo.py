"""OPO: the reward less its group's mean weighted by length (on-policy RL with optimal baseline, arXiv 2505.23585)."""

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


class Opo(Estimator[AdvantageFlags]):
    """``A_i = r_i - sum_j l_j r_j / sum_j l_j`` over the prompt group, l the loss tokens (2505.23585).

    The baseline has the least variance if the squared norm of a trajectory's gradient grows with its length. The paper
    takes one step per iteration, without KL and entropy.

    A group of one is its own baseline, so its advantage is 0 (verl returns the reward). Equal rewards give exactly 0,
    and a sample of advantage 0 has no gradient. In a group without loss tokens every trajectory weighs alike.
    """

    name = "opo"
    summary = "the reward less its group's mean, weighted by length"
    reads = ("normalize_advantages",)
    compares_groups = True  # a group of one is its own baseline

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [Term("A = reward - mean of its prompt group weighted by loss tokens", __name__)]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Subtract the weighted mean, computed from differences so that it is exact for equal rewards."""
        lengths = samples.lengths_by_group()
        baselines: dict[int, float] = {}
        for group, rewards in samples.by_group().items():
            weights = lengths[group] if any(lengths[group].values()) else dict.fromkeys(rewards, 1)
            first = next(iter(rewards.values()))
            difference = sum(weights[trajectory] * (reward - first) for trajectory, reward in rewards.items())
            baselines[group] = first + difference / sum(weights.values())
        pairs = zip(samples.rewards, samples.group_indices, strict=True)
        return [reward - baselines[group] for reward, group in pairs]
