"""The schedule of a step: which rank trains a sample, and in which micro-batch. Decided before the split."""

from __future__ import annotations

from collections.abc import Sequence

from miles.arguments.training import TrainingArguments
from miles.batching.packing import balanced_partition, pack_by_budget
from miles.train_batch import TrainBatch, TrainShard


def schedule_step(
    batch: TrainBatch, world_size: int, training: TrainingArguments, has_gradient: Sequence[bool] | None = None
) -> list[TrainShard]:
    """One shard a rank. Every rank gets the same number of micro-batches, because each is a collective operation.

    Which rank and micro-batch a sample lands in cannot change the gradient: its weight travels with it. Samples for
    which ``has_gradient`` is false get micro-batches of their own, to be scored only.
    """
    trained = has_gradient if has_gradient is not None else [True] * len(batch)
    lengths = batch.total_lengths
    ranks = balanced_partition(lengths, world_size) if training.balance_data else _in_order(len(batch), world_size)
    shards = [batch.select(rank) for rank in ranks]
    to_train = [[i for i, sample in enumerate(rank) if trained[sample]] for rank in ranks]
    to_score = [[i for i, sample in enumerate(rank) if not trained[sample]] for rank in ranks]
    return [
        TrainShard(shard, micro_batches, score_only)
        for shard, micro_batches, score_only in zip(
            shards,
            _micro_batches_of_ranks(shards, to_train, training, at_least=1),
            _micro_batches_of_ranks(shards, to_score, training, at_least=0),
            strict=True,
        )
    ]


def _micro_batches_of_ranks(
    shards: Sequence[TrainBatch], chosen: Sequence[Sequence[int]], training: TrainingArguments, at_least: int
) -> list[list[list[int]]]:
    """The ``chosen`` samples of each rank's shard in micro-batches, the same number on every rank."""
    lengths = [[shard.total_lengths[i] for i in indices] for shard, indices in zip(shards, chosen, strict=True)]
    per_rank = [_micro_batches(of_rank, training) for of_rank in lengths]
    count = max(at_least, *(len(micro_batches) for micro_batches in per_rank))
    return [
        [[indices[i] for i in part] for part in _exactly(micro_batches, count, of_rank, training)]
        for micro_batches, of_rank, indices in zip(per_rank, lengths, chosen, strict=True)
    ]


def _in_order(n: int, parts: int) -> list[list[int]]:
    """``n`` indices in ``parts`` runs whose sizes differ by at most one."""
    bounds = [n * part // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _micro_batches(lengths: Sequence[int], training: TrainingArguments) -> list[list[int]]:
    if training.use_dynamic_batch_size:
        assert training.max_tokens_per_gpu is not None, "validate() demands it"
        return pack_by_budget(lengths, training.max_tokens_per_gpu)
    size = training.micro_batch_size
    return [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]


def _exactly(
    micro_batches: list[list[int]], count: int, lengths: Sequence[int], training: TrainingArguments
) -> list[list[int]]:
    """``count`` micro-batches: where a rank needed fewer, its samples are spread anew, or empty ones are added."""
    if len(micro_batches) == count:
        return micro_batches
    if training.use_dynamic_batch_size:
        return balanced_partition(lengths, count)
    return micro_batches + [[] for _ in range(count - len(micro_batches))]
