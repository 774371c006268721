"""Read a whole step before it is taken: tokens that the objective treats apart, and the mean of the weights."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from miles.objective.chosen import Objective
from miles.objective.kl import masked_log_ratio
from miles.objective.policy_losses.base import StepTokens
from miles.objective.token_weights import WeightSum, mean_weight, sum_of_weights, top_entropy_tokens
from miles.training.backend import TrainBackend
from miles.training.scoring import entropies, log_probs
from miles.types.groups import gather_step
from miles.types.train_batch import TrainBatch, TrainShard


class _Sample(NamedTuple):
    """A sample of the step; columns are of its loss tokens, float64."""

    position: int  # in the step
    trajectory_id: int
    columns: list[np.ndarray]


@dataclass(frozen=True)
class TokenSelector:
    """Scores the policy before a step, and reads the tokens of the whole step. Every method is collective.

    Attributes:
        objective: The run's objective.
        group: The ranks that hold the step's tokens between them, in the order of its shards; None is all ranks.
    """

    objective: Objective
    group: dist.ProcessGroup | None = None

    def select(self, backend: TrainBackend, shard: TrainShard, step: int) -> TrainShard:
        """Return ``shard`` with the column ``selected``, which the policy loss chooses.

        In the first step of an iteration the current log-probs are the old ones, unless those are the engine's. If the
        old ones were not scored, because the loss does not ask for them in that step, nothing is chosen.

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
        is_current = step == 0 and not self.objective.flags.use_rollout_logprobs
        current = old if is_current else log_probs(backend, backend.policy, shard)
        advantages: Sequence[np.ndarray] | None = batch.advantages
        if advantages is None:
            advantages = [np.full(n, reward) for n, reward in zip(batch.response_lengths, batch.rewards, strict=True)]
        samples = self._whole_step(shard, current, old, advantages, _hashes(shard.batch, with_token=True))
        seed = zlib.crc32(np.asarray([step, *(s.trajectory_id for s in samples)], np.int64).tobytes())
        tokens = StepTokens(_scores_of_step(samples), _of_step(samples, 1), _of_step(samples, 2), seed)
        chosen = self.objective.policy_loss.select_tokens(self.objective.flags, tokens)
        return replace(shard, batch=replace(batch, selected=_own_part(shard, samples, chosen)))

    def rank_entropies(self, backend: TrainBackend, shard: TrainShard) -> TrainShard:
        """Return ``shard`` with the column ``top_entropy``: the tokens of ``--top-entropy-quantile``."""
        found = entropies(backend, backend.policy, shard)
        samples = self._whole_step(shard, found, _hashes(shard.batch, with_token=False))
        kept = top_entropy_tokens(_scores_of_step(samples), self.objective.flags.top_entropy_quantile)
        return replace(shard, batch=replace(shard.batch, top_entropy=_own_part(shard, samples, kept)))

    def mean_weight(self, shard: TrainShard) -> tuple[TrainShard, float]:
        """Return ``shard`` with ``tis_mean``, the mean weight of ``--use-tis`` over the step, and that mean.

        The sums are of one sample each, and exact, so no way of splitting the step changes a bit of it.
        """
        batch, flags = shard.batch, self.objective.flags
        assert batch.old_log_probs is not None, "Truncation asks for them"
        own: list[tuple[int, WeightSum]] = []
        for i in shard.samples_sent_by(dist.get_rank(self.group)):
            columns = (batch.old_log_probs[i], batch.rollout_log_probs[i], batch.loss_masks[i])
            old, engine, mask = (torch.tensor(column) for column in columns)  # copies: Ray's memory is read-only
            log_ratio = masked_log_ratio(old, engine, mask)[mask != 0]
            own.append((batch.position_in_step[i], sum_of_weights(flags, log_ratio)))
        mean = mean_weight(found for _, found in gather_step(own, self.group))
        return replace(shard, batch=replace(batch, tis_mean=mean)), mean

    def _whole_step(self, shard: TrainShard, *columns: Sequence[np.ndarray]) -> list[_Sample]:
        """Return all samples of the step in their order, with ``columns``, one array [response] per own sample."""
        return gather_step(list(self._own(shard, columns)), self.group)

    def _own(self, shard: TrainShard, columns: Sequence[Sequence[np.ndarray]]) -> Iterator[_Sample]:
        """Yield the samples that this rank sends."""
        batch = shard.batch
        for i in shard.samples_sent_by(dist.get_rank(self.group)):
            kept = batch.loss_masks[i] != 0
            found = [column[i][kept].astype(np.float64) for column in columns]
            yield _Sample(batch.position_in_step[i], batch.trajectory_ids[i], found)


def _of_step(samples: Sequence[_Sample], column: int) -> np.ndarray:
    """Return one column of all samples, float64 [loss tokens of the step]."""
    return np.concatenate([*(sample.columns[column] for sample in samples), np.zeros(0)])


def _hashes(batch: TrainBatch, with_token: bool) -> list[np.ndarray]:
    """Return a hash of all that is before each response token, with the token itself if asked; [response]."""
    found = []
    for tokens, length in zip(batch.tokens, batch.response_lengths, strict=True):
        powers = np.cumprod(np.full(len(tokens), 0x9E3779B97F4A7C15, np.uint64))  # modulo 2^64
        hashes = np.cumsum((np.asarray(tokens).astype(np.uint64) + np.uint64(1)) * powers)
        end = len(tokens) if with_token else len(tokens) - 1
        found.append(hashes[end - length : end])
    return found


def _scores_of_step(samples: Sequence[_Sample]) -> np.ndarray:
    """Return the first column, with one score for all tokens of one hash, the last column.

    They are one number of the model, as at the first tokens of the responses to one prompt. In bf16 they may differ by
    more than their last digits, by the micro-batch that each was scored in.
    """
    _, first, place = np.unique(_of_step(samples, -1), return_index=True, return_inverse=True)
    scores: np.ndarray = _of_step(samples, 0)[first][place]
    return scores


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
