"""Pass@k by leave-one-out: the gain of a group from its best answer (arXiv 2503.19595)."""

from typing import Any

from miles.objective.estimators.base import Estimator, SampleRewards
from miles.objective.registry import Term


class PassKBest(Estimator):
    """``A_i = max_j r_j - max_(j != i) r_j``, with k the size of the group (2503.19595).

    The objective is the best reward of a group, and the baseline the best without trajectory i, which does not depend
    on i. So only the one best trajectory of a group has an advantage, its lead over the second; a tie has none. verl's
    ``grpo_passk`` divides this by the standard deviation of the group by default.

    A group of one has no others, and its advantage is 0; verl refuses it. Equal rewards give exactly 0, and a sample of
    advantage 0 has no gradient.
    """

    name = "passk_best"
    summary = "pass@k: the lead of the group's best reward over the second best (2503.19595)"
    reads = ("normalize_advantages",)

    def smallest_group(self, flags: Any) -> int:
        """Return 2: a group of one has no others."""
        return 2

    def formula(self, flags: Any) -> list[Term]:
        """Return what A is."""
        return [Term("A = max of its prompt group - max of the other rewards of the group", __name__)]

    def sample_advantages(self, flags: Any, samples: SampleRewards) -> list[float]:
        """Subtract the best of the others from the best of all."""
        leads: dict[int, dict[int, float]] = {}
        for group, rewards in samples.by_group().items():
            leads[group] = dict.fromkeys(rewards, 0.0)
            if len(rewards) > 1:
                best, second = sorted(rewards.values())[-1:-3:-1]
                leads[group][max(rewards, key=rewards.__getitem__)] = best - second
        pairs = zip(samples.group_indices, samples.trajectory_ids, strict=True)
        return [leads[group][trajectory] for group, trajectory in pairs]


ESTIMATOR = PassKBest()
