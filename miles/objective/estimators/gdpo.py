"""GDPO: several rewards, each normalized within its group on its own (reward-decoupled normalization, 2601.05242)."""

import statistics
from collections.abc import Iterable
from dataclasses import replace

from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards, divisor, less_group_mean
from miles.objective.registry import Term

EPS = 1e-6


class Gdpo(Estimator[AdvantageFlags]):
    """``A = S / (std of S + 1e-6)``, ``S_i = sum_k w_k (r_ik - mean_k) / (std_k + 1e-6)`` (2601.05242).

    Mean and standard deviation (the unbiased one) of reward k are over the prompt group, std of S is over the
    iteration's trajectories. The paper also subtracts the mean of S, which is 0, because it is in each group. GRPO adds
    the rewards first, so that different combinations with the same sum have the same advantage, and the reward that
    varies most decides. ``--rm-type a:1,b:0.2`` sets the rewards and weights; a run with one reward has one k.

    verl divides by the spread over the tokens of the step instead: add ``--normalize-advantages``, which undoes the
    division by std of S. A group of one, and equal rewards, have advantages of exactly 0 and no gradient.
    """

    name = "gdpo"
    summary = "several rewards (--rm-type a:1,b:0.2), each normalized within its prompt group on its own"
    reads = ("normalize_advantages",)
    reads_reward_parts = True
    compares_groups = True  # a group of one has no spread

    def formula(self, flags: AdvantageFlags) -> list[Term]:
        """Return the formula of A."""
        return [
            Term("A = S / (std of S over the iteration)", __name__),
            Term("S = Σ_k w_k (reward_k - mean of its prompt group) / std of its prompt group", __name__),
        ]

    def sample_advantages(self, flags: AdvantageFlags, samples: SampleRewards) -> list[float]:
        """Normalize each reward within each group, add them up, and divide by one spread.

        Raises:
            ValueError: Some samples have several rewards, and others have not, or ``--rm-type`` has no weights for
                them, as may be for saved samples.
        """
        sums = [0.0] * len(samples.rewards)
        for weight, rewards in _rewards_with_weights(samples):
            normalized = less_group_mean(replace(samples, rewards=rewards), std=True, eps=EPS)
            sums = [total + weight * advantage for total, advantage in zip(sums, normalized, strict=True)]
        by_trajectory = [s for group in replace(samples, rewards=sums).by_group().values() for s in group.values()]
        spread = statistics.stdev(by_trajectory) if len(by_trajectory) > 1 else 0.0
        return [total / divisor(spread, EPS) for total in sums]


def _rewards_with_weights(samples: SampleRewards) -> list[tuple[float, list[float]]]:
    """Return each reward's weight and its value for every sample."""
    names = dict.fromkeys(name for parts in samples.parts for name in parts)
    if not names and len(samples.part_weights) <= 1:
        return [(1.0, list(samples.rewards))]
    for parts, group, trajectory in zip(samples.parts, samples.group_indices, samples.trajectory_ids, strict=True):
        if parts.keys() != names.keys():
            raise ValueError(
                f"--advantage-estimator gdpo: trajectory {trajectory} of prompt group {group} has the rewards "
                f"{', '.join(parts) or 'of no name'}, others have {', '.join(names)}; a sample that the reward "
                "function failed on has none: use --reward-error drop"
            )
    if names.keys() != samples.part_weights.keys():
        weights = ",".join(f"{name}:{weight:g}" for name, weight in samples.part_weights.items())
        fault = f"--rm-type has the weights {weights}" if weights else "there is no --rm-type with weights"
        raise ValueError(
            f"--advantage-estimator gdpo: the samples have the rewards {', '.join(names) or 'of no name'}, and "
            f"{fault}; give --rm-type the names and weights of the run that saved them{_example(names)}"
        )
    return [(samples.part_weights[name], [parts[name] for parts in samples.parts]) for name in names]


def _example(names: Iterable[str]) -> str:
    weights = ",".join(f"{name}:1" for name in names)
    return f", such as {weights}" if weights else ""
