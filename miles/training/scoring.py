"""What is scored before the first step of an iteration: log-probs of the models, and the critic's values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from miles.batch.collate import split_by_sample
from miles.objective.chosen import Objective
from miles.objective.registry import Needs
from miles.training.backend import PolicyScorer, ScoredModel, Scorer, TrainBackend, ValueScorer
from miles.types.train_batch import MicroBatch, TrainShard


def needs_of(objective: Objective, step: int, trains_policy: bool, passes: int = 1) -> Needs:
    """Return what must be scored for optimizer step ``step`` (from 0) of an iteration.

    Log-probs under the weights that the iteration began with are needed from the second step on; in the first they are
    the current ones, unless a part of the objective asks for them or a later pass takes the step again. The inputs of
    the advantages are scored for every step, also if only the critic learns.
    """
    loss, advantages = objective.needs, objective.advantages_need
    return Needs(
        old_log_probs=(trains_policy and (step > 0 or passes > 1 or loss.old_log_probs)) or advantages.old_log_probs,
        ref_log_probs=(trains_policy and loss.ref_log_probs) or advantages.ref_log_probs,
        teacher_log_probs=advantages.teacher_log_probs,
        values=advantages.values,
        sum_squared_probs=advantages.sum_squared_probs,
    )


def with_engine_log_probs(shard: TrainShard) -> TrainShard:
    """Return ``shard`` with the engine's log-probs as the old ones, for ``--use-rollout-logprobs``."""
    return replace(shard, batch=replace(shard.batch, old_log_probs=shard.batch.rollout_log_probs))


def score(backend: TrainBackend, shard: TrainShard, needs: Needs) -> TrainShard:
    """Return ``shard`` with the columns that ``needs`` names. Those that are there already are kept. Collective."""
    batch = shard.batch
    if needs.ref_log_probs and batch.ref_log_probs is None:
        assert backend.reference is not None, "reference log-probs need --use-kl-loss or --kl-coef"
        batch = replace(batch, ref_log_probs=log_probs(backend, backend.reference, shard))
    if needs.teacher_log_probs and batch.teacher_log_probs is None:
        assert backend.teacher is not None, "a teacher in the trainer, or a column of its servers' log-probs"
        batch = replace(batch, teacher_log_probs=log_probs(backend, backend.teacher, shard))
    if needs.old_log_probs and batch.old_log_probs is None:
        batch = replace(batch, old_log_probs=log_probs(backend, backend.policy, shard))
    if needs.sum_squared_probs and batch.sum_squared_probs is None:
        assert batch.old_log_probs is not None, "who needs the sum needs the log-probs"
        batch = replace(batch, sum_squared_probs=sum_squared_probs(backend, backend.policy, shard, batch.old_log_probs))
    if needs.values and batch.values is None:
        assert backend.critic is not None, "values need a critic"
        batch = replace(batch, values=values(backend, backend.critic, shard))
    return replace(shard, batch=batch)


def log_probs(backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the log-probs of each sample's response tokens, float32 [response], on every rank."""
    return _by_sample(backend, model, shard, lambda scorer: scorer(with_entropy=False).log_probs)


def sum_squared_probs(
    backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard, log_probs: list[np.ndarray]
) -> list[np.ndarray]:
    """Return the sum over the vocabulary of squared probabilities at each response token, float64 [response].

    ``log_probs`` are those of the model, so that no logits are needed: with logits z, their log-sum-exp L(z) and q the
    probabilities at half the temperature, ``log p = z - L(z)`` and ``log q = 2 z - L(2 z)`` of any token, and the sum
    is ``exp(L(2 z) - 2 L(z)) = p^2 / q``.
    """
    sharper = _by_sample(backend, model, shard, lambda scorer: scorer(with_entropy=False, sharpness=2.0).log_probs)
    pairs = zip(log_probs, sharper, strict=True)
    return [np.exp(2.0 * p.astype(np.float64) - q) for p, q in pairs]


def entropies(backend: TrainBackend, model: ScoredModel[PolicyScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the entropy of the policy at each response token, in nats, float32 [response], on every rank."""

    def read(scorer: PolicyScorer) -> torch.Tensor:
        found = scorer(with_entropy=True).entropy
        assert found is not None, "it was asked for"
        return found

    return _by_sample(backend, model, shard, read)


def values(backend: TrainBackend, model: ScoredModel[ValueScorer], shard: TrainShard) -> list[np.ndarray]:
    """Return the value of the state in which each response token is chosen, float32 [response], on every rank."""
    return _by_sample(backend, model, shard, lambda scorer: scorer())


def _by_sample(
    backend: TrainBackend, model: ScoredModel[Scorer], shard: TrainShard, read: Callable[[Scorer], torch.Tensor]
) -> list[np.ndarray]:
    """Return one array per sample, in the order of the shard, whichever micro-batch and ranks it is on."""
    plans = (*shard.micro_batches, *shard.score_only)

    def kept(micro: MicroBatch, scorer: Scorer) -> tuple[MicroBatch, torch.Tensor]:
        return micro, read(scorer)

    scored = model.forward(shard, plans, kept)
    of_sample: dict[int, np.ndarray] = {}
    for plan, (micro, column) in zip(plans, scored, strict=bool(scored)):  # empty on all pipeline stages but the last
        of_sample |= zip(plan.samples, split_by_sample(column, micro), strict=True)
    return backend.from_last_stage([of_sample[i] for i in sorted(of_sample)], shard.batch.response_lengths)
