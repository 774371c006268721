"""Pass@k by leave-one-out: the gain of a group from its best answer (arXiv 2503.19595)."""

import statistics
from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term

_EPS = 1e-6  # added to the standard deviation, as in verl


@dataclass(frozen=True)
class PassKBestFlags(AdvantageFlags):
    """passk_best: whether the lead is in units of the group's spread."""

    passk_best_std: bool = flag(
        False,
        "divide the advantage of --advantage-estimator passk_best by the standard deviation of its group, as verl's "
        "grpo_passk does; the paper does not",
    )


class PassKBest(Estimator[PassKBestFlags]):
    """``A_i = max_j r_j - max_(j != i) r_j``, with k the size of the group (2503.19595).

    The objective is the best reward of a group, and the baseline the best without trajectory i, which does not depend
    on i. So only the one best trajectory of a group has an advantage, its lead over the second; a tie has none. This
    is the paper's. verl's ``grpo_passk`` divides it by ``std + 1e-6``, the unbiased standard deviation of the group, by
    default: ``--passk-best-std``.

    A group of one has no others, and its advantage is 0; verl refuses it. Equal rewards give exactly 0, and a sample of
    advantage 0 has no gradient.
    """

    name = "passk_best"
    summary = "pass@k: the lead of the group's best reward over the second best (2503.19595)"
    reads = ("normalize_advantages", "passk_best_std")
    own_flags = PassKBestFlags
    compares_groups = True  # a group of one has no others

    def formula(self, flags: PassKBestFlags) -> list[Term]:
        """Return the formula of A."""
        lead = "max of its prompt group - max of the other rewards of the group"
        return [Term(f"A = ({lead}) / std of the group" if flags.passk_best_std else f"A = {lead}", __name__)]

    def sample_advantages(self, flags: PassKBestFlags, samples: SampleRewards) -> list[float]:
        """Subtract the best of the others from the best of all; divide by the spread if asked."""
        leads: dict[int, dict[int, float]] = {}
        for group, rewards in samples.by_group().items():
            leads[group] = dict.fromkeys(rewards, 0.0)
            if len(rewards) > 1:
                best, second = sorted(rewards.values())[-1:-3:-1]
                scale = statistics.stdev(rewards.values()) + _EPS if flags.passk_best_std else 1.0
                leads[group][max(rewards, key=rewards.__getitem__)] = (best - second) / scale
        pairs = zip(samples.group_indices, samples.trajectory_ids, strict=True)
        return [leads[group][trajectory] for group, trajectory in pairs]
