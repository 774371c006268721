"""Exchange scores between the ranks of the trainer, so that each can compute phase 2 of the advantages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from miles.metrics import Metric
from miles.objective.chosen import build_objective
from miles.objective.kl import masked_log_ratio
from miles.objective.settings import LossArguments
from miles.objective.token_advantages import SampleTokens, token_advantages
from miles.train_batch import TrainBatch, TrainShard


@dataclass(frozen=True)
class AdvantageEstimator:
    """Makes the advantages of tokens from scored shards (phase 2), if the estimator has that phase.

    Attributes:
        loss: The flags of the objective.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    loss: LossArguments
    group: dist.ProcessGroup | None = None

    @property
    def reads_kl(self) -> bool:
        """Whether log-probs of policy and reference must be in the batch."""
        return self.loss.kl_coef != 0

    def advantages(self, shard: TrainShard) -> tuple[TrainShard, dict[str, Metric]]:
        """Return ``shard`` with advantages (and returns), and metrics that are the step's on every rank. Collective.

        Every rank gets the few numbers per token that the others have, and computes the whole step's: the samples of a
        trajectory may be on several ranks, and whitening needs all of them.
        """
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, list(self._own(shard)), group=self.group)
        step = {position: tokens for part in everyone for position, tokens in part}
        order = sorted(step)
        found = token_advantages(build_objective(self.loss), [step[position] for position in order])
        index = {position: i for i, position in enumerate(order)}
        mine = [index[position] for position in shard.batch.position_in_step]
        returns = None if found.returns is None else [found.returns[i] for i in mine]
        batch = replace(shard.batch, advantages=[found.advantages[i] for i in mine], returns=returns)
        return replace(shard, batch=batch), found.metrics

    def _own(self, shard: TrainShard) -> Iterator[tuple[int, SampleTokens]]:
        """Position and tokens of each sample; of ranks that share a sample only the first sends it."""
        rank = dist.get_rank(self.group)
        for plan in (*shard.micro_batches, *shard.score_only):
            if rank % plan.context_parallel_size == 0:
                for sample in plan.samples:
                    yield shard.batch.position_in_step[sample], self._tokens(shard.batch, sample)

    def _tokens(self, batch: TrainBatch, i: int) -> SampleTokens:
        log_ratio = None
        if self.reads_kl:
            assert batch.old_log_probs is not None and batch.ref_log_probs is not None
            columns = (batch.old_log_probs[i], batch.ref_log_probs[i], batch.loss_masks[i])
            policy, reference, mask = (torch.tensor(column) for column in columns)  # copies: Ray's memory is read-only
            log_ratio = masked_log_ratio(policy, reference, mask).numpy()
        values = None if batch.values is None else batch.values[i]
        return SampleTokens(batch.trajectory_ids[i], batch.rewards[i], batch.loss_masks[i], values, log_ratio)
