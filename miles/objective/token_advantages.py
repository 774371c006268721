"""Advantages of a step's tokens from rewards, values and KL: PPO's, REINFORCE++'s, and whitening.

Everything here sees the whole step, so that no way of splitting it can change a mean or cut a trajectory. Tokens that
the loss mask leaves out (a tool's answer, a turn of the user) are no actions: they are taken out of the trajectory, and
the token after them follows the one before. A rollout of several samples is one trajectory, sample after sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles.metrics import Metric
from miles.objective.gae import generalized_advantages
from miles.objective.kl import approximate_kl
from miles.objective.settings import LossArguments


@dataclass(frozen=True)
class SampleTokens:
    """What is known of one sample's response; arrays are [response]."""

    trajectory_id: int
    reward: float  # of TrainBatch.rewards
    loss_mask: np.ndarray
    values: np.ndarray | None = None  # the critic's; V of the state in which the token is chosen
    log_ratio: np.ndarray | None = None  # log policy - log reference, both before the first step; with --kl-coef


@dataclass(frozen=True)
class StepAdvantages:
    """One float32 array [response] a sample, 0 where it is masked; ``returns`` are for a critic."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    metrics: dict[str, Metric]


def token_advantages(loss: LossArguments, samples: Sequence[SampleTokens]) -> StepAdvantages:
    """Of the samples of a whole step, those of a rollout in their order.

    ``ppo``: GAE over the rollout's unmasked tokens t = 1..T of ``r_t = [t = T] reward - kl_coef KL_t``, the reward
    being the mean of its samples'; returns are ``A + V``. ``reinforce_plus_plus`` (arXiv 2501.03262): the discounted
    return of the same ``r_t``. Its baseline variant, ``grpo`` and ``gspo``: the sample's reward (less its group's mean)
    ``- kl_coef KL_t``. ``--normalize-advantages`` then whitens over all unmasked tokens of the step.
    """
    trajectories = list(_trajectories(loss, samples))
    if loss.advantage_estimator == "ppo":
        found = generalized_advantages([t.rewards for t in trajectories], [t.values for t in trajectories],
                                       loss.gamma, loss.lambd)  # fmt: skip
    elif loss.advantage_estimator == "reinforce_plus_plus":
        nothing = [np.zeros_like(t.rewards) for t in trajectories]
        found = generalized_advantages([t.rewards for t in trajectories], nothing, loss.gamma, 1.0)
    else:
        found = [t.rewards for t in trajectories]
    returns = [a + t.values for a, t in zip(found, trajectories, strict=True)] if loss.has_critic else None
    metrics = _metrics(loss, trajectories, found, returns)
    if loss.normalize_advantages:
        found = whitened(found)
    return StepAdvantages(
        _by_sample(samples, trajectories, found),
        None if returns is None else _by_sample(samples, trajectories, returns),
        metrics,
    )


def whitened(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """``(x - mean) / sqrt(variance + 1e-8)`` over all entries of all columns; the variance is the unbiased one."""
    everything = np.concatenate([*columns, np.zeros(0)])
    if not len(everything):
        return list(columns)
    spread = everything.var(ddof=1) if len(everything) > 1 else 0.0
    return [(column - everything.mean()) / np.sqrt(spread + 1e-8) for column in columns]


@dataclass(frozen=True)
class _Trajectory:
    """The unmasked tokens of a rollout, float64 [T]."""

    members: list[int]  # its samples
    rewards: np.ndarray
    values: np.ndarray
    kl: np.ndarray


def _trajectories(loss: LossArguments, samples: Sequence[SampleTokens]) -> Iterator[_Trajectory]:
    of_rollout: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        of_rollout.setdefault(sample.trajectory_id, []).append(index)
    for members in of_rollout.values():
        parts = [samples[i] for i in members]
        kept = [part.loss_mask != 0 for part in parts]
        kl = np.concatenate([_kl(loss, part)[k] for part, k in zip(parts, kept, strict=True)])
        rewards = -loss.kl_coef * kl
        if loss.advantage_estimator in ("ppo", "reinforce_plus_plus"):
            rewards[-1:] += np.mean([part.reward for part in parts])
        else:
            rewards += np.concatenate([np.full(int(k.sum()), p.reward) for p, k in zip(parts, kept, strict=True)])
        values = [np.zeros(0) if p.values is None else p.values[k] for p, k in zip(parts, kept, strict=True)]
        yield _Trajectory(members, rewards, np.concatenate(values).astype(np.float64), kl)


def _kl(loss: LossArguments, sample: SampleTokens) -> np.ndarray:
    if not loss.kl_coef:
        return np.zeros(len(sample.loss_mask))
    assert sample.log_ratio is not None, "--kl-coef needs the log-probs of policy and reference"
    return approximate_kl(torch.from_numpy(sample.log_ratio).double(), loss.kl_loss_type).numpy()


def _by_sample(
    samples: Sequence[SampleTokens], trajectories: Sequence[_Trajectory], columns: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The tokens of each trajectory back where they stand in its samples."""
    found = [np.zeros(len(sample.loss_mask), np.float32) for sample in samples]
    for trajectory, column in zip(trajectories, columns, strict=True):
        start = 0
        for index in trajectory.members:
            kept = samples[index].loss_mask != 0
            count = int(kept.sum())
            found[index][kept] = column[start : start + count]
            start += count
    return found


def _metrics(
    loss: LossArguments,
    trajectories: Sequence[_Trajectory],
    advantages: Sequence[np.ndarray],
    returns: Sequence[np.ndarray] | None,
) -> dict[str, Metric]:
    """Means over the unmasked tokens, and how much of the returns' variance the critic explains; advantages are raw."""
    everything = np.concatenate([*advantages, np.zeros(0)])
    if not len(everything):
        return {}

    def mean(column: np.ndarray) -> Metric:
        return Metric(float(column.sum()), float(len(column)))

    metrics = {"advantages": mean(everything)}
    if loss.kl_coef:
        metrics["reward_kl"] = mean(np.concatenate([t.kl for t in trajectories]))
    if returns is not None:
        target, predicted = np.concatenate(list(returns)), np.concatenate([t.values for t in trajectories])
        metrics |= {"returns": mean(target), "values": mean(predicted)}
        spread = float(np.square(target - target.mean()).sum())
        error = target - predicted
        unexplained = float(np.square(error - error.mean()).sum())
        if spread > 0:  # equal returns have no variance to explain
            metrics["explained_variance"] = Metric(spread - unexplained, spread)
    return metrics
