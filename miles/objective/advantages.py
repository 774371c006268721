"""From rewards to advantages: group statistics on the rollout side, one advantage a token on the trainer's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch


def normalize_rewards(
    rewards: Sequence[float],
    group_indices: Sequence[int],
    trajectory_ids: Sequence[int],
    *,
    std: bool,
    eps: float = 1e-6,
) -> list[float]:
    """``reward - mean`` of its prompt group, over ``std + eps`` of the group if ``std``; one number a sample.

    GRPO (arXiv 2402.03300); without ``std`` Dr.GRPO (2503.20783). The standard deviation is the unbiased one. Every
    rollout counts once, with the mean reward of its samples, so that a trajectory in several samples weighs no more
    than one in a single sample. A group of one rollout, or of equal rewards, gives exactly 0. Must see whole groups,
    and finite rewards.

    >>> normalize_rewards([1.0, 0.0, 5.0], [0, 0, 1], [0, 1, 2], std=False)
    [0.5, -0.5, 0.0]
    """
    assert len(rewards) == len(group_indices) == len(trajectory_ids)
    means: dict[int, float] = {}
    scales: dict[int, float] = {}
    for group, group_rewards in _trajectory_rewards(rewards, group_indices, trajectory_ids).items():
        means[group] = statistics.mean(group_rewards)
        spread = statistics.stdev(group_rewards) if std and len(group_rewards) > 1 else 0.0
        scales[group] = spread + eps if std else 1.0
    return [(reward - means[group]) / scales[group] for reward, group in zip(rewards, group_indices, strict=True)]


def check_rewards(rewards: Sequence[float], group_indices: Sequence[int], trajectory_ids: Sequence[int]) -> None:
    """Raise ``ValueError``, naming rollout and group, for the first reward that is NaN or infinite."""
    for reward, group, rollout in zip(rewards, group_indices, trajectory_ids, strict=True):
        if not math.isfinite(reward):
            raise ValueError(
                f"rewards: {reward} for rollout {rollout} of prompt group {group}; a reward must be finite, or there "
                "is no advantage; mend the reward function (--rm-type, --custom-rm-path)"
            )


def grpo_advantages(rewards: torch.Tensor, sample_index: torch.Tensor) -> torch.Tensor:
    """Every response token gets its sample's normalized reward: rewards [S], sample_index [R] -> float32 [R]."""
    return rewards.float()[sample_index]


def _trajectory_rewards(
    rewards: Sequence[float], group_indices: Sequence[int], trajectory_ids: Sequence[int]
) -> dict[int, list[float]]:
    """The rewards of each group, one a rollout: the mean of its samples'."""
    of_rollout: dict[tuple[int, int], list[float]] = {}
    for reward, group, rollout in zip(rewards, group_indices, trajectory_ids, strict=True):
        of_rollout.setdefault((group, rollout), []).append(float(reward))
    of_group: dict[int, list[float]] = {}
    for (group, _), values in of_rollout.items():
        of_group.setdefault(group, []).append(statistics.mean(values))
    return of_group
