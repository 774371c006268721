"""Choose tokens from a whole step before it is taken, for objectives that treat some tokens apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from miles.objective.chosen import Objective
from miles.objective.policy_losses.base import StepTokens
from miles.objective.token_weights import top_entropy_tokens
from miles.train_batch import TrainShard
from miles.training.backend import TrainBackend
from miles.training.scoring import entropies, log_probs


class _Sample(NamedTuple):
    """A sample of the step; columns are of its loss tokens, float64."""

    position: int  # in the step
    trajectory_id: int
    columns: list[np.ndarray]


@dataclass(frozen=True)
class TokenSelector:
    """Scores the policy before a step, and chooses among the tokens of the whole step. Every method is collective.

    Attributes:
        objective: The run's objective.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    objective: Objective
    group: dist.ProcessGroup | None = None

    def select(self, backend: TrainBackend, shard: TrainShard, step: int) -> TrainShard:
        """Return ``shard`` with the column ``selected``, which the policy loss chooses.

        In the first step of an iteration the current log-probs are the old ones. If these were not scored, because the
        loss does not ask for them in that step, nothing is chosen.

        Args:
            backend: This rank's backend.
            shard: This rank's part of the step.
            step: The step's place in its iteration, from 0.
        """
        batch = shard.batch
        old = batch.old_log_probs
        if old is None:
            assert step == 0, "later steps have old log-probs"
            return shard
        current = old if step == 0 else log_probs(backend, backend.policy, shard)
        advantages: Sequence[np.ndarray] | None = batch.advantages
        if advantages is None:
            advantages = [np.full(n, reward) for n, reward in zip(batch.response_lengths, batch.rewards, strict=True)]
        samples = self._whole_step(shard, current, old, advantages)
        seed = zlib.crc32(np.asarray([step, *(s.trajectory_id for s in samples)], np.int64).tobytes())
        tokens = StepTokens(_of_step(samples, 0), _of_step(samples, 1), _of_step(samples, 2), seed)
        chosen = self.objective.policy_loss.select_tokens(self.objective.flags, tokens)
        return replace(shard, batch=replace(batch, selected=_own_part(shard, samples, chosen)))

    def rank_entropies(self, backend: TrainBackend, shard: TrainShard) -> TrainShard:
        """Return ``shard`` with the column ``top_entropy``: the tokens of ``--top-entropy-quantile``."""
        samples = self._whole_step(shard, entropies(backend, backend.policy, shard))
        kept = top_entropy_tokens(_of_step(samples, 0), self.objective.flags.top_entropy_quantile)
        return replace(shard, batch=replace(shard.batch, top_entropy=_own_part(shard, samples, kept)))

    def _whole_step(self, shard: TrainShard, *columns: Sequence[np.ndarray]) -> list[_Sample]:
        """Return all samples of the step in their order, with ``columns``, one array [response] per own sample."""
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, list(self._own(shard, columns)), group=self.group)
        return sorted((sample for part in everyone for sample in part), key=lambda sample: sample.position)

    def _own(self, shard: TrainShard, columns: Sequence[Sequence[np.ndarray]]) -> Iterator[_Sample]:
        """Yield the samples of this rank; of ranks that share a sample only the first sends it."""
        rank, batch = dist.get_rank(self.group), shard.batch
        for plan in (*shard.micro_batches, *shard.score_only):
            if rank % plan.context_parallel_size:
                continue
            for i in plan.samples:
                kept = batch.loss_masks[i] != 0
                found = [column[i][kept].astype(np.float64) for column in columns]
                yield _Sample(batch.position_in_step[i], batch.trajectory_ids[i], found)


def _of_step(samples: Sequence[_Sample], column: int) -> np.ndarray:
    """Return one column of all samples, float64 [loss tokens of the step]."""
    return np.concatenate([*(sample.columns[column] for sample in samples), np.zeros(0)])


def _own_part(shard: TrainShard, samples: Sequence[_Sample], chosen: np.ndarray) -> list[np.ndarray]:
    """Return ``chosen``, bool [loss tokens of the step], as a 0/1 column of the shard's own samples."""
    ends = np.cumsum([len(sample.columns[0]) for sample in samples])[:-1]
    of_sample = dict(zip((sample.position for sample in samples), np.split(chosen, ends), strict=bool(samples)))
    found = []
    for position, mask in zip(shard.batch.position_in_step, shard.batch.loss_masks, strict=True):
        column = np.zeros(len(mask), np.float32)
        column[mask != 0] = of_sample[position]
        found.append(column)
    return found
