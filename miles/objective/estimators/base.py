"""Define an advantage estimator, and the group statistics that several of them share.

Advantages are made in two phases. Phase 1 runs on the rollout side, over whole groups, before steps are cut: one number
per sample. Phase 2 runs on the trainer after scoring, over a whole step: one number per token (token_advantages.py).
"""

import math
import statistics
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, TypeVar

from miles.base.flags import flag
from miles.objective.kl import KlFlags
from miles.objective.registry import Needs, ObjectivePart, Term
from miles.types.sample import exact_mean

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.base.flags import Errors


@dataclass(frozen=True)
class SampleRewards:
    """The rewards of whole groups, one entry per sample. A trajectory may have several samples.

    Attributes:
        rewards: The reward of each sample.
        group_indices: Its prompt group.
        trajectory_ids: Its trajectory.
        loss_tokens: Its number of loss tokens.
        parts: Each reward of a sample by name, unweighted, if ``--rm-type`` names several.
        part_weights: The weight of each.
        baselines: The reward of its prompt's greedy response, if the estimator asks for one.
    """

    rewards: Sequence[float]
    group_indices: Sequence[int]
    trajectory_ids: Sequence[int]
    loss_tokens: Sequence[int] = ()
    parts: Sequence[Mapping[str, float]] = ()
    part_weights: Mapping[str, float] = field(default_factory=dict)
    baselines: Sequence[float] = ()

    def __post_init__(self) -> None:
        assert len(self.rewards) == len(self.group_indices) == len(self.trajectory_ids)
        assert all(len(column) in (0, len(self.rewards)) for column in (self.loss_tokens, self.parts, self.baselines))

    def check_finite(self) -> None:
        """Raise ``ValueError``, naming trajectory and group, for the first reward that is NaN or infinite."""
        for reward, group, trajectory in zip(self.rewards, self.group_indices, self.trajectory_ids, strict=True):
            if not math.isfinite(reward):
                raise ValueError(
                    f"rewards: {reward} for trajectory {trajectory} of prompt group {group}; a reward must be finite, "
                    "or there is no advantage; fix the reward function (--rm-type, --custom-rm-path)"
                )

    def by_group(self) -> dict[int, dict[int, float]]:
        """Return the reward of each trajectory in each group: the mean of its samples' rewards."""
        samples: dict[int, dict[int, list[float]]] = {}
        for reward, group, trajectory in zip(self.rewards, self.group_indices, self.trajectory_ids, strict=True):
            samples.setdefault(group, {}).setdefault(trajectory, []).append(float(reward))
        return {
            group: {trajectory: exact_mean(values) for trajectory, values in trajectories.items()}
            for group, trajectories in samples.items()
        }

    def lengths_by_group(self) -> dict[int, dict[int, int]]:
        """Return the number of loss tokens of each trajectory in each group: the sum over its samples."""
        assert len(self.loss_tokens) == len(self.rewards), "the lengths are not known"
        lengths: dict[int, dict[int, int]] = {}
        for tokens, group, trajectory in zip(self.loss_tokens, self.group_indices, self.trajectory_ids, strict=True):
            of_group = lengths.setdefault(group, {})
            of_group[trajectory] = of_group.get(trajectory, 0) + tokens
        return lengths


@dataclass(frozen=True)
class TrajectoryTokens:
    """The loss tokens of a trajectory, as phase 2 reads them: float64 arrays [T].

    Attributes:
        rewards: The reward of each token.
        values: The critic's values; empty without a critic.
        group: The prompt group of the trajectory.
        score_norms: The squared norm of the gradient of each token's log-prob by its logits, ``1 - 2 p + sum_v
            p(v)^2``; empty unless the estimator ``reads_score_norms``.
    """

    rewards: "np.ndarray"
    values: "np.ndarray"
    group: int
    score_norms: "np.ndarray"


@dataclass(frozen=True)
class AdvantageFlags(KlFlags):
    """loss: what is common to the advantage estimators."""

    normalize_advantages: bool = flag(
        False, "whiten the advantages over the response tokens of the step", needs="a policy that learns"
    )


E = TypeVar("E", bound=AdvantageFlags)


class Estimator(ObjectivePart[E]):
    """An advantage estimator.

    Attributes:
        default_policy_loss: The policy loss of a run without ``--policy-loss``.
        compares_groups: Whether a group of one has an advantage of 0, as rewards are compared within a group.
        by_token: Whether it implements phase 2. If not, every token has its sample's number of phase 1.
        reward_at_last_token: Whether phase 2 puts the reward on the last token of the trajectory, or on every token.
        greedy_baseline: Whether it reads the reward of a greedy response to each prompt, which is generated for it.
        reads_reward_parts: Whether it reads the parts of a sum of rewards, and not the sum alone.
        reads_score_norms: Whether its phase 2 reads the group and the score norms of each trajectory.
    """

    flag: ClassVar[str] = "advantage_estimator"
    instead: Mapping[str, str] = {"kl_coef": "use --use-kl-loss --kl-loss-coef"}
    default_policy_loss: str = "ppo"
    compares_groups: bool = False
    by_token: bool = False
    reward_at_last_token: bool = False
    greedy_baseline: bool = False
    reads_reward_parts: bool = False
    reads_score_norms: bool = False

    @abstractmethod
    def formula(self, flags: E) -> list[Term]:
        """Return the lines of the formula that it computes, with the run's numbers."""

    def smallest_group(self, flags: E) -> int:
        """Return the trajectories per prompt below which every advantage is 0."""
        return 2 if self.compares_groups else 1

    def needs(self, flags: E) -> Needs:
        """Ask for both policies if a KL is part of each token's reward."""
        reads_kl = flags.kl_coef != 0
        return Needs(old_log_probs=reads_kl, ref_log_probs=reads_kl)

    def token_needs(self, flags: E) -> Needs:
        """Return what phase 2 reads of ``needs``. Unlike that, it may import the user's function."""
        return self.needs(flags)

    def sample_advantages(self, flags: E, samples: SampleRewards) -> list[float]:
        """Compute phase 1: one number per sample, from whole groups. By default the rewards unchanged."""
        return list(samples.rewards)

    def token_advantages(self, flags: E, trajectories: Sequence[TrajectoryTokens]) -> list["np.ndarray"]:
        """Compute phase 2: the advantages of a step, one float64 array [T] per trajectory. By default the rewards."""
        return [trajectory.rewards for trajectory in trajectories]

    def returns(
        self, flags: E, trajectories: Sequence[TrajectoryTokens], advantages: Sequence["np.ndarray"]
    ) -> list["np.ndarray"]:
        """Compute the targets of a critic, in the form of ``token_advantages``. By default ``A + V``."""
        return [a + trajectory.values for a, trajectory in zip(advantages, trajectories, strict=True)]

    def estimates_by_token(self, flags: E) -> bool:
        """Return whether phase 2 runs: for estimators that implement it, and for whitening."""
        return self.by_token or flags.normalize_advantages

    def zero_advantage_has_gradient(self, flags: E) -> bool:
        """Return true if phase 2 follows, after which a 0 of phase 1 may be another number."""
        return self.estimates_by_token(flags)


def require_whitening(name: str, flags: AdvantageFlags, errors: "Errors") -> None:
    """Report a run of the estimator ``name``, which whitens, that does not."""
    if not flags.normalize_advantages:
        rule = "is defined with whitened advantages"
        errors.refuse("advantage_estimator", name, rule, "add --normalize-advantages")


def less_group_mean(samples: SampleRewards, *, std: bool, eps: float = 1e-6) -> list[float]:
    """Compute ``reward - mean`` of the prompt group, over ``std + eps`` of the group if ``std``; one number per sample.

    GRPO (arXiv 2402.03300); without ``std`` Dr.GRPO (2503.20783). The standard deviation is the unbiased one. Every
    trajectory counts once, so that one in several samples weighs no more than one in a single sample. A group of one
    trajectory, or of equal rewards, gives exactly 0.

    >>> less_group_mean(SampleRewards([1.0, 0.0, 5.0], [0, 0, 1], [0, 1, 2]), std=False)
    [0.5, -0.5, 0.0]
    """
    means: dict[int, float] = {}
    scales: dict[int, float] = {}
    for group, of_trajectory in samples.by_group().items():
        means[group], spread = _mean_and_spread(tuple(of_trajectory.values()), std)
        scales[group] = divisor(spread, eps)
    pairs = zip(samples.rewards, samples.group_indices, strict=True)
    return [(reward - means[group]) / scales[group] for reward, group in pairs]


def divisor(spread: float, eps: float) -> float:
    """Return ``spread + eps``; 1 if no trajectory differs, as samples that are rewarded apart from theirs still may."""
    return spread + eps if spread else 1.0


@lru_cache(maxsize=4096)
def _mean_and_spread(rewards: tuple[float, ...], std: bool) -> tuple[float, float]:
    """Return the mean and, with ``std``, the standard deviation, exactly rounded.

    That is slow arithmetic with fractions, and the groups of a step often have the same rewards.
    """
    return statistics.mean(rewards), statistics.stdev(rewards) if std and len(rewards) > 1 else 0.0


def spread_over_tokens(advantages: "torch.Tensor", sample_index: "torch.Tensor") -> "torch.Tensor":
    """Give every response token its sample's advantage: [S] and sample_index [R] -> float32 [R]."""
    return advantages.float()[sample_index]
