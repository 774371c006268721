"""The schedule of a step: which rank trains a sample, and in which micro-batch. Decided before the split."""

from __future__ import annotations

from collections.abc import Sequence

from miles.arguments.training import TrainingArguments
from miles.batching.packing import PackedSample, balanced_partition, pack_by_budget, split_to_count
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
    per_rank = [_micro_batches(shard, indices, training) for shard, indices in zip(shards, chosen, strict=True)]
    count = max(at_least, *(len(micro_batches) for micro_batches in per_rank))
    return [split_to_count(micro_batches, count) for micro_batches in per_rank]


def _in_order(n: int, parts: int) -> list[list[int]]:
    """``n`` indices in ``parts`` runs whose sizes differ by at most one."""
    bounds = [n * part // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _micro_batches(shard: TrainBatch, chosen: Sequence[int], training: TrainingArguments) -> list[list[int]]:
    if not training.use_dynamic_batch_size:
        size = training.micro_batch_size
        return [list(chosen[i : i + size]) for i in range(0, len(chosen), size)]
    assert training.max_tokens_per_gpu is not None, "validate() demands it"
    samples = [_packed_sample(shard, i) for i in chosen]
    return [[chosen[i] for i in part] for part in pack_by_budget(samples, training.max_tokens_per_gpu)]


def _packed_sample(shard: TrainBatch, index: int) -> PackedSample:
    tokens, response = shard.tokens[index], shard.response_lengths[index]
    prompt = tokens[: len(tokens) - response]
    return PackedSample(prompt.tobytes(), len(prompt), response)
