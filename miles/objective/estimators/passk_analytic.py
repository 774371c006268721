"""Pass@k in closed form: the mean over all subsets of k answers of a group (arXiv 2508.10751)."""

import math
from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


@dataclass(frozen=True)
class PassKFlags(AdvantageFlags):
    """passk_analytic: the k, and which answers are right."""

    pass_k: int = flag(
        2, "k of --advantage-estimator passk_analytic; fewer than the trajectories of a group", at_least=1
    )
    pass_correct_above: float = flag(0.0, "a reward above this is a right answer for passk_analytic")


class PassKAnalytic(Estimator[PassKFlags]):
    """Advantages of all C(N, k) subsets of a group, averaged over those that contain the trajectory (2508.10751, 2.4).

    A subset's reward is 1 if one of its answers is right. With N answers, N_neg of them wrong::

        R = 1 - C(N_neg, k) / C(N, k),  s = sqrt(R (1 - R))
        A of a right answer = (1 - R) / s
        A of a wrong answer = (1 - R - C(N_neg - 1, k - 1) / C(N - 1, k - 1)) / s

    They add up to 0 in each group. With k = 1 this is GRPO with the standard deviation of the population.

    Groups of at most k trajectories, of one in particular, have one subset or none, and advantages of 0. So have groups
    that are all right, all wrong, or with fewer than k wrong (R = 1). A sample of advantage 0 has no gradient.
    """

    name = "passk_analytic"
    summary = "pass@k: the mean over all subsets of k of the group, in closed form (2508.10751)"
    reads = ("normalize_advantages", "pass_k", "pass_correct_above")
    own_flags = PassKFlags

    def smallest_group(self, flags: PassKFlags) -> int:
        """Return k + 1: k trajectories have one subset, which is its own mean."""
        return flags.pass_k + 1

    def formula(self, flags: PassKFlags) -> list[Term]:
        """Return the formula of A."""
        k = flags.pass_k
        return [
            Term(
                f"A = ((1 - R) - [reward <= {flags.pass_correct_above:g}] C(W-1, {k - 1}) / C(N-1, {k - 1})) "
                "/ sqrt(R (1 - R))",
                __name__,
            ),
            Term(f"R = 1 - C(W, {k}) / C(N, {k}), W of the N rewards of its prompt group are wrong", __name__),
        ]

    def sample_advantages(self, flags: PassKFlags, samples: SampleRewards) -> list[float]:
        """Count the right answers of each group. A trajectory is right by the mean of its samples' rewards."""
        by_group: dict[int, dict[int, float]] = {}
        for group, rewards in samples.by_group().items():
            right = {trajectory: reward > flags.pass_correct_above for trajectory, reward in rewards.items()}
            of_right, of_wrong = subset_advantages(len(right), sum(right.values()), flags.pass_k)
            by_group[group] = {trajectory: of_right if is_right else of_wrong for trajectory, is_right in right.items()}
        pairs = zip(samples.group_indices, samples.trajectory_ids, strict=True)
        return [by_group[group][trajectory] for group, trajectory in pairs]


def subset_advantages(num_answers: int, num_right: int, k: int) -> tuple[float, float]:
    """Return the advantage of a right and of a wrong answer.

    >>> subset_advantages(2, 1, 1)
    (1.0, -1.0)
    """
    wrong = num_answers - num_right
    if num_answers <= k or num_right == 0 or wrong < k:
        return 0.0, 0.0
    failed = math.comb(wrong, k) / math.comb(num_answers, k)  # 1 - R
    spread = math.sqrt(failed * (1.0 - failed))
    others = math.comb(wrong - 1, k - 1) / math.comb(num_answers - 1, k - 1)
    return failed / spread, (failed - others) / spread
