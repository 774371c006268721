"""GPG: the reward less its group's mean, scaled for groups of equal rewards (group policy gradient, 2504.02546)."""

import statistics
from dataclasses import dataclass
from typing import Literal

from miles.base.flags import flag
from miles.objective.estimators.base import AdvantageFlags, Estimator, SampleRewards
from miles.objective.registry import Term


@dataclass(frozen=True)
class GpgFlags(AdvantageFlags):
    """gpg: how the advantages are scaled."""

    gpg_scale: Literal["groups", "rewards"] = flag(
        "groups",
        "what --advantage-estimator gpg scales by: groups, all prompt groups over those whose rewards differ, as in "
        "the paper; rewards, all trajectories over those whose reward is not 0, as in verl's code",
    )


class Gpg(Estimator[GpgFlags]):
    """``A_i = alpha (r_i - mean(r)) / F_norm`` with F_norm = 1 (2504.02546, Eq. 7).

    In the paper, ``--gpg-scale groups``, ``alpha = B / (B - M)``: B is the number of prompt groups of the iteration, M
    the number with equal rewards, which have no gradient. The scale makes the mean over B groups one over the others.
    verl's code, ``--gpg-scale rewards``, has ``alpha = N / max(K, 1)``: K of the N trajectories of the iteration have a
    reward that is not 0. With rewards of 0 and 1 this is 1 over the accuracy; with rewards of -1 and 1 it is 1.

    The paper's policy loss is ``--policy-loss gpg``, the default here.

    A group of one counts in M, and its advantage is 0. Equal rewards give exactly 0, and a sample of advantage 0 has no
    gradient.
    """

    name = "gpg"
    summary = "the reward less its group's mean, scaled up for the groups of equal rewards"
    reads = ("normalize_advantages", "gpg_scale")
    own_flags = GpgFlags
    default_policy_loss = "gpg"
    compares_groups = True  # a group of one is its own mean

    def formula(self, flags: GpgFlags) -> list[Term]:
        """Return the formula of A."""
        if flags.gpg_scale == "rewards":
            return [
                Term("A = N / max(K, 1) (reward - mean of its prompt group)", __name__),
                Term("K of the N trajectories of the iteration have a reward that is not 0", __name__),
            ]
        return [
            Term("A = B / (B - M) (reward - mean of its prompt group)", __name__),
            Term("M of the B prompt groups of the iteration have equal rewards", __name__),
        ]

    def sample_advantages(self, flags: GpgFlags, samples: SampleRewards) -> list[float]:
        """Compare rewards within each group, and scale them."""
        groups = samples.by_group()
        if flags.gpg_scale == "groups":
            counted = [min(rewards.values()) < max(rewards.values()) for rewards in groups.values()]
        else:
            counted = [reward != 0 for rewards in groups.values() for reward in rewards.values()]
        scale = len(counted) / max(sum(counted), 1)
        means = {group: statistics.mean(rewards.values()) for group, rewards in groups.items()}
        pairs = zip(samples.rewards, samples.group_indices, strict=True)
        return [scale * (reward - means[group]) for reward, group in pairs]
