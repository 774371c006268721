"""The schedule of a step: which rank trains a sample, in which micro-batch. Decided on the rollout side, before the split."""

from __future__ import annotations

from collections.abc import Sequence

from miles.arguments.training import TrainingArguments
from miles.batching.packing import balanced_partition, pack_by_budget
from miles.train_batch import TrainBatch, TrainShard


def schedule_step(batch: TrainBatch, world_size: int, training: TrainingArguments) -> list[TrainShard]:
    """One shard a rank. Every rank gets the same number of micro-batches, because each is a collective operation.

    Which rank and micro-batch a sample lands in cannot change the gradient: its weight travels with it.
    """
    lengths = batch.total_lengths
    ranks = balanced_partition(lengths, world_size) if training.balance_data else _in_order(len(batch), world_size)
    per_rank = [_micro_batches([lengths[i] for i in rank], training) for rank in ranks]
    count = max(1, *(len(micro_batches) for micro_batches in per_rank))
    return [
        TrainShard(batch.select(rank), _exactly(micro_batches, count, [lengths[i] for i in rank], training))
        for rank, micro_batches in zip(ranks, per_rank, strict=True)
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
    """``count`` micro-batches: where a rank needed fewer, its samples are spread anew by tokens, or empty ones added."""
    if len(micro_batches) == count:
        return micro_batches
    if training.use_dynamic_batch_size:
        return balanced_partition(lengths, count)
    return micro_batches + [[] for _ in range(count - len(micro_batches))]
