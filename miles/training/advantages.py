"""Exchange scores between the ranks of the trainer, so that each can compute phase 2 of the advantages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from miles.objective.chosen import build_objective
from miles.objective.kl import masked_log_ratio
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages
from miles.types.groups import gather_step
from miles.types.metrics import Metric
from miles.types.train_batch import TrainBatch, TrainShard


@dataclass(frozen=True)
class AdvantageEstimator:
    """Makes the advantages of tokens from scored shards (phase 2), if the estimator has that phase.

    Attributes:
        loss: The flags of the objective.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    loss: LossArguments
    group: dist.ProcessGroup | None = None

    def advantages(self, shard: TrainShard) -> tuple[TrainShard, dict[str, Metric]]:
        """Return ``shard`` with advantages (and returns), and metrics that are the step's on every rank. Collective.

        Every rank gets the few numbers per token that the others have, and computes the whole step's: the samples of a
        trajectory may be on several ranks, and whitening needs all of them.
        """
        own = shard.samples_sent_by(dist.get_rank(self.group))
        sent = [(shard.batch.position_in_step[i], self._tokens(shard.batch, i)) for i in own]
        step = gather_step(sent, self.group)
        found = token_advantages(build_objective(self.loss), [tokens for _, tokens in step])
        index = {position: i for i, (position, _) in enumerate(step)}
        mine = [index[position] for position in shard.batch.position_in_step]
        returns = None if found.returns is None else [found.returns[i] for i in mine]
        batch = replace(shard.batch, advantages=[found.advantages[i] for i in mine], returns=returns)
        return replace(shard, batch=batch), found.metrics

    def _tokens(self, batch: TrainBatch, i: int) -> SampleTokens:
        reference = _log_ratio(batch, batch.ref_log_probs, i) if self.loss.kl_coef else None
        teacher = _log_ratio(batch, batch.teacher_log_probs, i) if self.loss.use_opd else None
        values = None if batch.values is None else batch.values[i]
        return SampleTokens(
            batch.trajectory_ids[i],
            batch.rewards[i],
            batch.loss_masks[i],
            values,
            reference,
            teacher,
            batch.group_indices[i],
            _score_norm(batch, i),
        )


def _score_norm(batch: TrainBatch, i: int) -> np.ndarray | None:
    """Return ``1 - 2 p + sum_v p(v)^2`` of each response token, float64, if the sum was scored.

    It is ``(1 - p)^2`` and the squares of the other probabilities, whose sum is between 0 and ``(1 - p)^2``. Near p = 1
    rounding of the scores is larger than that and may make it negative, so it is held to these bounds.
    """
    if batch.sum_squared_probs is None:
        return None
    assert batch.old_log_probs is not None, "both are scored before"
    p = np.exp(batch.old_log_probs[i].astype(np.float64))
    rest = np.square(1.0 - p)
    norm: np.ndarray = np.clip(1.0 - 2.0 * p + batch.sum_squared_probs[i].astype(np.float64), rest, 2.0 * rest)
    return norm


def _log_ratio(batch: TrainBatch, other: list[np.ndarray] | None, i: int) -> np.ndarray:
    """Return the policy's log-probs less another model's, of the response of sample ``i``; masked tokens have 0."""
    assert batch.old_log_probs is not None and other is not None, "both are scored before"
    columns = (batch.old_log_probs[i], other[i], batch.loss_masks[i])
    policy, model, mask = (torch.tensor(column) for column in columns)  # copies: Ray's memory is read-only
    return masked_log_ratio(policy, model, mask).numpy()
