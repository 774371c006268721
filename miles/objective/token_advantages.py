"""Phase 2 of the advantages: one number per token of a step, from rewards, values and KL.

Everything here sees the whole step, so that no way of splitting it can change a mean or cut a trajectory. Tokens that
the loss mask leaves out (a tool's answer, a turn of the user) are no actions: they are taken out of the trajectory, and
the token after them follows the one before. A trajectory of several samples is one sequence, sample after sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from miles.objective.estimators.base import TrajectoryTokens
from miles.objective.kl import approximate_kl
from miles.objective.loss_types.base import Objective
from miles.objective.rounding import FP32, FP64, centred, magnitude
from miles.objective.settings import LossArguments
from miles.types.metrics import Metric


@dataclass(frozen=True)
class SampleTokens:
    """The scores of one sample's response; arrays are [response]."""

    trajectory_id: int
    reward: float  # of TrainBatch.rewards
    loss_mask: np.ndarray
    values: np.ndarray | None = None  # the critic's; V of the state where the token is chosen
    log_ratio: np.ndarray | None = None  # log policy - log reference, both before the first step; with --kl-coef
    teacher_log_ratio: np.ndarray | None = None  # log policy - log teacher, before the first step; with --use-opd
    group_index: int = 0
    score_norm: np.ndarray | None = None  # 1 - 2 p + sum p(v)^2, if the estimator reads it


@dataclass(frozen=True)
class StepAdvantages:
    """One float32 array [response] per sample, 0 for masked tokens; ``returns`` are for a critic."""

    advantages: list[np.ndarray]
    returns: list[np.ndarray] | None
    metrics: dict[str, Metric]


def token_advantages(objective: Objective, samples: Sequence[SampleTokens]) -> StepAdvantages:
    """Estimate the advantages of a whole step.

    A trajectory's loss tokens get rewards: the trajectory's (the mean of its samples') on the last token, or each
    sample's on every token, as the estimator states, less ``kl_coef KL_t``. The estimator makes advantages of these and
    of the critic's values, and the returns that the critic learns. ``--use-opd`` subtracts the KL to the teacher, and
    ``--normalize-advantages`` then whitens the advantages over all loss tokens of the step.

    Args:
        objective: The run's objective.
        samples: The samples of the step, with each trajectory's samples in their order.
    """
    loss = objective.flags
    trajectories = list(_trajectories(objective, samples))
    advantages = objective.estimator.token_advantages(loss, trajectories)
    returns = objective.estimator.returns(loss, trajectories, advantages) if objective.needs.values else None
    if loss.use_opd:
        advantages = [a - loss.opd_kl_coef * t.teacher_kl for a, t in zip(advantages, trajectories, strict=True)]
    metrics = _metrics(loss, trajectories, advantages, returns)
    if loss.normalize_advantages:
        advantages = whitened(advantages)
    return StepAdvantages(
        _by_sample(samples, trajectories, advantages),
        None if returns is None else _by_sample(samples, trajectories, returns),
        metrics,
    )


def whitened(columns: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute ``(x - mean) / sqrt(variance + 1e-8)`` over all entries of all columns, with the unbiased variance."""
    everything = np.concatenate([*columns, np.zeros(0)])
    if not len(everything):
        return list(columns)
    deviations = centred(everything, FP64 * magnitude(everything))
    deviations /= np.sqrt(np.square(deviations).sum() / max(len(deviations) - 1, 1) + 1e-8)
    return np.split(deviations, np.cumsum([len(column) for column in columns])[:-1])[: len(columns)]


@dataclass(frozen=True)
class _Trajectory(TrajectoryTokens):
    members: list[int]  # its samples
    kl: np.ndarray
    teacher_kl: np.ndarray


def _trajectories(objective: Objective, samples: Sequence[SampleTokens]) -> Iterator[_Trajectory]:
    loss = objective.flags
    of_trajectory: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        of_trajectory.setdefault(sample.trajectory_id, []).append(index)
    for members in of_trajectory.values():
        parts = [samples[i] for i in members]
        kl = _of_loss_tokens(parts, [_kl(loss, part) for part in parts])
        rewards = -loss.kl_coef * kl
        if objective.estimator.reward_at_last_token:
            rewards[-1:] += np.mean([part.reward for part in parts])
        else:
            rewards += _of_loss_tokens(parts, [np.full(len(part.loss_mask), part.reward) for part in parts])
        values = _of_loss_tokens(parts, [part.values for part in parts])
        teacher_kl = _of_loss_tokens(parts, [_teacher_kl(loss, part) for part in parts])
        norms = _of_loss_tokens(parts, [part.score_norm for part in parts])
        yield _Trajectory(rewards, values, parts[0].group_index, norms, members, kl, teacher_kl)


def _of_loss_tokens(parts: Sequence[SampleTokens], columns: Sequence[np.ndarray | None]) -> np.ndarray:
    """Join the loss tokens of columns [response], one per sample, float64 [T]; None is an empty one."""
    tokens = [
        np.zeros(0) if column is None else column[part.loss_mask != 0]
        for part, column in zip(parts, columns, strict=True)
    ]
    return np.concatenate(tokens).astype(np.float64)


def _kl(loss: LossArguments, sample: SampleTokens) -> np.ndarray:
    if not loss.kl_coef:
        return np.zeros(len(sample.loss_mask))
    assert sample.log_ratio is not None, "--kl-coef needs the log-probs of policy and reference"
    return approximate_kl(torch.from_numpy(sample.log_ratio).double(), loss.kl_loss_type).numpy()


def _teacher_kl(loss: LossArguments, sample: SampleTokens) -> np.ndarray:
    if not loss.use_opd:
        return np.zeros(len(sample.loss_mask))
    assert sample.teacher_log_ratio is not None, "--use-opd needs the log-probs of policy and teacher"
    return sample.teacher_log_ratio.astype(np.float64)


def _by_sample(
    samples: Sequence[SampleTokens], trajectories: Sequence[_Trajectory], columns: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Put the tokens of each trajectory back into its samples."""
    arrays = [np.zeros(len(sample.loss_mask), np.float32) for sample in samples]
    for trajectory, column in zip(trajectories, columns, strict=True):
        start = 0
        for index in trajectory.members:
            mask = samples[index].loss_mask != 0
            count = int(mask.sum())
            arrays[index][mask] = column[start : start + count]
            start += count
    return arrays


def _metrics(
    loss: LossArguments,
    trajectories: Sequence[_Trajectory],
    advantages: Sequence[np.ndarray],
    returns: Sequence[np.ndarray] | None,
) -> dict[str, Metric]:
    """Return means over loss tokens, and how much of the returns' variance the critic explains; advantages are raw."""
    everything = np.concatenate([*advantages, np.zeros(0)])
    if not len(everything):
        return {}

    def mean(column: np.ndarray) -> Metric:
        return Metric(float(column.sum()), float(len(column)))

    metrics = {"advantages": mean(everything)}
    if loss.kl_coef:
        metrics["reward_kl"] = mean(np.concatenate([t.kl for t in trajectories]))
    if loss.use_opd:
        metrics["opd_kl"] = mean(np.concatenate([t.teacher_kl for t in trajectories]))
    if returns is not None:
        target = np.concatenate(list(returns))
        predicted = np.concatenate([t.values for t in trajectories])
        metrics |= {"returns": mean(target), "values": mean(predicted)}
        # The critic's values are fp32: returns that are equal in fp32 have no variance that it could explain.
        spread = float(np.square(centred(target, FP32 * magnitude(target, predicted))).sum())
        error = target - predicted
        unexplained = float(np.square(error - error.mean()).sum())
        if spread > 0:
            metrics["explained_variance"] = Metric(spread - unexplained, spread)
    return metrics
