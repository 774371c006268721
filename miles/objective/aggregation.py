"""How per-token losses become the loss of a step: the four aggregation modes and the user's own reducer.

All modes are one formula, ``1/N sum_i S_i / sample_denoms[i]``, with denominators that are computed once over the whole
step, before anything is split (docs/loss-aggregation.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from miles.objective.hooks import get_custom_pg_loss_reducer
from miles.objective.reducers import Reducer, get_sum_of_sample_mean, per_sample_reducer
from miles.objective.settings import Aggregation, LossArguments
from miles.train_batch import MicroBatch


@dataclass(frozen=True)
class StepDenominators:
    """The counts of a whole step. Field for field the columns and numbers of ``TrainBatch`` of the same names."""

    sample_denoms: list[float]  # of pg_loss, one a sample
    trajectory_token_counts: list[float]  # max(M_r, 1) of the sample's rollout
    num_trajectories: int  # N
    num_loss_tokens: int  # T
    expected_loss_mass: float  # sum over all tokens of m / (N * denom): what a token loss of 1 everywhere adds up to


def step_denominators(
    mode: Aggregation,
    *,
    token_counts: Sequence[int],
    trajectory_ids: Sequence[int],
    group_indices: Sequence[int],
    divisor: float | None,
) -> StepDenominators:
    """The denominators of one step from its samples: masked tokens M_i, rollout and prompt group of each, all [S].

    ``divisor`` is L of ``constant``; the other modes do not read it. Sources: GRPO (arXiv 2402.03300), DAPO
    (2503.14476), Dr.GRPO (2503.20783 Eq. 2). The example is the one of ``TrainBatch``:

    >>> example = dict(token_counts=[2, 6, 4, 8], trajectory_ids=[0, 1, 2, 3], group_indices=[0, 0, 1, 1], divisor=None)
    >>> step_denominators("prompt_mean", **example).sample_denoms
    [4.0, 4.0, 6.0, 6.0]
    """
    assert len(token_counts) == len(trajectory_ids) == len(group_indices)
    tokens_of_trajectory, tokens_of_group = Counter[int](), Counter[int]()
    for count, rollout, group in zip(token_counts, trajectory_ids, group_indices, strict=True):
        tokens_of_trajectory[rollout] += count
        tokens_of_group[group] += count
    rollouts, groups, tokens = len(tokens_of_trajectory), len(tokens_of_group), sum(token_counts)
    trajectory_token_counts = [float(max(tokens_of_trajectory[r], 1)) for r in trajectory_ids]

    if mode == "sample_mean":
        denoms = trajectory_token_counts
    elif mode == "prompt_mean":
        denoms = [max(tokens_of_group[g], 1) * groups / rollouts for g in group_indices]
    elif mode == "token_mean":
        denoms = [max(tokens, 1) / rollouts] * len(token_counts)
    else:
        denoms = [_checked_divisor(divisor)] * len(token_counts)

    mass = _loss_mass(mode, tokens_of_trajectory, tokens_of_group, divisor)
    return StepDenominators(list(denoms), trajectory_token_counts, rollouts, tokens, mass)


def _loss_mass(
    mode: Aggregation,
    tokens_of_trajectory: Mapping[int, int],
    tokens_of_group: Mapping[int, int],
    divisor: float | None,
) -> float:
    """What a token loss of 1 everywhere adds up to, read off the objective, not off the denominators it has to check.

    A mean of ones is 1; a rollout or prompt without a token keeps its place in the mean and adds nothing.
    """
    tokens, rollouts = sum(tokens_of_trajectory.values()), len(tokens_of_trajectory)
    if not tokens:
        return 0.0
    if mode == "sample_mean":
        return sum(count > 0 for count in tokens_of_trajectory.values()) / rollouts
    if mode == "prompt_mean":
        return sum(count > 0 for count in tokens_of_group.values()) / len(tokens_of_group)
    if mode == "token_mean":
        return 1.0
    return tokens / (_checked_divisor(divisor) * rollouts)


def get_pg_loss_reducer(loss: LossArguments, micro: MicroBatch) -> Reducer:
    """The reducer of pg_loss alone: the user's own where one is named, else that of ``--loss-aggregation``.

    Raises ``ValueError`` if a mode that reads ``sample_denoms`` meets a micro-batch without them: another objective
    than the one asked for is never computed instead.
    """
    if loss.custom_pg_loss_reducer_function_path is not None:
        return get_custom_pg_loss_reducer(loss.custom_pg_loss_reducer_function_path, loss, micro)
    if is_per_token(loss) or loss.loss_aggregation == "sample_mean":
        return get_sum_of_sample_mean(micro, is_per_token(loss))
    num_denoms = 0 if micro.sample_denoms is None else len(micro.sample_denoms)
    if num_denoms != len(micro.response_lengths):
        raise ValueError(
            f"--loss-aggregation {loss.loss_aggregation}: the batch carries {num_denoms} sample_denoms for "
            f"{len(micro.response_lengths)} samples, and without them the objective is not known; "
            "let the converter keep one a sample (miles.objective.aggregation.step_denominators), "
            "or use --loss-aggregation sample_mean"
        )
    return per_sample_reducer(micro, micro.sample_denoms)


def is_per_token(loss: LossArguments) -> bool:
    """Whether means are over the step's tokens: ``token_mean``, or its older name ``--calculate-per-token-loss``."""
    return loss.calculate_per_token_loss or loss.loss_aggregation == "token_mean"


def _checked_divisor(divisor: float | None) -> float:
    if divisor is None or not math.isfinite(divisor) or divisor <= 0:
        raise ValueError(
            f"--loss-aggregation-divisor {divisor}: --loss-aggregation constant divides by it, so it must be a finite "
            "number above 0; give one, for example the longest response"
        )
    return float(divisor)
