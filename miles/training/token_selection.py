"""Choose tokens from a whole step before it is taken, for policy losses that treat some tokens apart."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from miles.objective.chosen import Objective
from miles.objective.policy_losses.base import StepTokens
from miles.train_batch import TrainShard
from miles.training.backend import TrainBackend
from miles.training.scoring import log_probs


class _Sample(NamedTuple):
    """What the choice reads of a sample; arrays are of its loss tokens, float64."""

    position: int  # in the step
    trajectory_id: int
    log_probs: np.ndarray
    old_log_probs: np.ndarray
    advantages: np.ndarray


@dataclass(frozen=True)
class TokenSelector:
    """Scores the policy before a step, and lets the policy loss choose among the tokens of the whole step.

    Attributes:
        objective: The run's objective, whose policy loss ``selects_tokens``.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    objective: Objective
    group: dist.ProcessGroup | None = None

    def select(self, backend: TrainBackend, shard: TrainShard, step: int) -> TrainShard:
        """Return ``shard`` with the column ``selected``. Collective.

        In the first step of an iteration the current log-probs are the old ones. If these were not scored, because the
        loss does not ask for them in that step, nothing is chosen.

        Args:
            backend: This rank's backend.
            shard: This rank's part of the step.
            step: The step's place in its iteration, from 0.
        """
        old = shard.batch.old_log_probs
        if old is None:
            assert step == 0, "later steps have old log-probs"
            return shard
        current = old if step == 0 else log_probs(backend, backend.policy, shard)
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, list(self._own(shard, current, old)), group=self.group)
        samples = sorted((sample for part in everyone for sample in part), key=lambda sample: sample.position)
        tokens = StepTokens(
            *(np.concatenate([*column, np.zeros(0)]) for column in _columns(samples)),
            seed=zlib.crc32(np.asarray([step, *(s.trajectory_id for s in samples)], np.int64).tobytes()),
        )
        chosen = self.objective.policy_loss.select_tokens(self.objective.flags, tokens)
        ends = np.cumsum([len(sample.log_probs) for sample in samples])
        parts = dict(zip((s.position for s in samples), np.split(chosen, ends[:-1]), strict=True)) if samples else {}
        selected = []
        for position, mask in zip(shard.batch.position_in_step, shard.batch.loss_masks, strict=True):
            of_sample = np.zeros(len(mask), np.float32)
            of_sample[mask != 0] = parts[position]
            selected.append(of_sample)
        return replace(shard, batch=replace(shard.batch, selected=selected))

    def _own(self, shard: TrainShard, current: list[np.ndarray], old: list[np.ndarray]) -> Iterator[_Sample]:
        """Yield the samples of this rank; of ranks that share a sample only the first sends it."""
        rank, batch = dist.get_rank(self.group), shard.batch
        for plan in (*shard.micro_batches, *shard.score_only):
            if rank % plan.context_parallel_size:
                continue
            for i in plan.samples:
                kept = batch.loss_masks[i] != 0
                advantages = np.full(len(kept), batch.rewards[i]) if batch.advantages is None else batch.advantages[i]
                columns = (current[i], old[i], advantages)
                yield _Sample(
                    batch.position_in_step[i], batch.trajectory_ids[i], *(c[kept].astype(np.float64) for c in columns)
                )


def _columns(samples: list[_Sample]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    return [s.log_probs for s in samples], [s.old_log_probs for s in samples], [s.advantages for s in samples]
