"""The schedule of a step: which ranks train a sample, and in which micro-batch. Decided before the split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles.arguments.parallel import ParallelArguments
from miles.arguments.training import TrainingArguments
from miles.batching.packing import PackedSample, balanced_partition, pack_by_budget, rows_by_budget, split_to_count
from miles.parallel.context_parallel import padded_length
from miles.parallel.dynamic_context_parallel import plan_dynamic_context_parallel
from miles.train_batch import MicroBatchPlan, TrainBatch, TrainShard

Plans = list[list[MicroBatchPlan]]  # one list a rank


def schedule_step(
    batch: TrainBatch,
    ranks: int,
    training: TrainingArguments,
    parallel: ParallelArguments,
    has_gradient: Sequence[bool] | None = None,
    watch_mass: bool = False,
    share_prompts: bool = True,
) -> list[TrainShard]:
    """One shard a rank. Every rank gets the same number of micro-batches, because each is a collective operation.

    ``ranks`` counts the ranks that hold different tokens (data parallel times context parallel). Which of them and
    which micro-batch a sample lands in cannot change the gradient: its weight travels with it. Samples for which
    ``has_gradient`` is false get micro-batches of their own, to be scored only; not so with ``watch_mass``, where the
    loss-mass canary is to see the weight of every token. Without ``share_prompts`` the token budget counts a prompt
    once a sample, as ``collate`` without it lays it out; with ``--qkv-format bshd`` it counts the rows' padding, too.
    """
    if watch_mass:
        has_gradient = None
    trained = [i for i in range(len(batch)) if has_gradient is None or has_gradient[i]]
    scored = [i for i in range(len(batch)) if has_gradient is not None and not has_gradient[i]]
    if parallel.dynamic_context_parallel:
        assert parallel.max_seqlen_per_dp_cp_rank is not None, "validate() demands it"
        plans = [_dynamic(batch, part, ranks, parallel.max_seqlen_per_dp_cp_rank) for part in (trained, scored)]
    else:
        plans = _static(batch, [trained, scored], ranks, training, parallel, share_prompts)
    to_train, to_score = plans
    mass = batch.expected_loss_mass if watch_mass else None
    if not to_train[0]:
        to_train = [[MicroBatchPlan(())] for _ in range(ranks)]
    return [_shard(batch, mass, *of_rank) for of_rank in zip(to_train, to_score, strict=True)]


def _shard(
    batch: TrainBatch, mass: float | None, to_train: list[MicroBatchPlan], to_score: list[MicroBatchPlan]
) -> TrainShard:
    """The samples that the plans name, and the plans in terms of their places in the shard."""
    samples = sorted({i for plan in (*to_train, *to_score) for i in plan.samples})
    place = {sample: i for i, sample in enumerate(samples)}

    def local(plans: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        return [replace(plan, samples=tuple(place[i] for i in plan.samples)) for plan in plans]

    return TrainShard(batch.select(samples), local(to_train), local(to_score), mass)


def _static(
    batch: TrainBatch,
    kinds: Sequence[list[int]],
    ranks: int,
    training: TrainingArguments,
    parallel: ParallelArguments,
    share_prompts: bool,
) -> list[Plans]:
    """The same size throughout: consecutive ranks are one replica, which has one share of the samples."""
    size, padded = parallel.context_parallel_size, parallel.qkv_format == "bshd"
    replicas = ranks // size
    lengths = batch.total_lengths
    shares = balanced_partition(lengths, replicas) if training.balance_data else _in_order(len(batch), replicas)
    plans: list[Plans] = []
    for kind in kinds:
        wanted = set(kind)
        chosen = [[i for i in share if i in wanted] for share in shares]
        per_replica = [_micro_batches(batch, indices, training, parallel, share_prompts) for indices in chosen]
        count = max(len(micro_batches) for micro_batches in per_replica)
        cut = [split_to_count(micro_batches, count) for micro_batches in per_replica]
        plans.append(
            [[MicroBatchPlan(tuple(part), size, padded) for part in cut[rank // size]] for rank in range(ranks)]
        )
    return plans


def _dynamic(batch: TrainBatch, chosen: Sequence[int], ranks: int, max_seqlen_per_rank: int) -> Plans:
    """Every micro-batch over all ranks, each of its groups with samples of its own."""
    lengths = batch.total_lengths
    micro_batches = plan_dynamic_context_parallel([lengths[i] for i in chosen], ranks, max_seqlen_per_rank)
    return [
        [
            MicroBatchPlan(tuple(chosen[i] for i in micro.groups[rank // micro.size]), micro.size)
            for micro in micro_batches
        ]
        for rank in range(ranks)
    ]


def _in_order(n: int, parts: int) -> list[list[int]]:
    """``n`` indices in ``parts`` runs whose sizes differ by at most one."""
    bounds = [n * part // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _micro_batches(
    batch: TrainBatch,
    chosen: Sequence[int],
    training: TrainingArguments,
    parallel: ParallelArguments,
    share_prompts: bool,
) -> list[list[int]]:
    if not training.use_dynamic_batch_size:
        count = training.micro_batch_size
        return [list(chosen[i : i + count]) for i in range(0, len(chosen), count)]
    assert training.max_tokens_per_gpu is not None, "validate() demands it"
    size = parallel.context_parallel_size
    budget = training.max_tokens_per_gpu * size
    if parallel.qkv_format == "bshd":
        bins = rows_by_budget([len(batch.tokens[i]) for i in chosen], budget)
    else:
        bins = pack_by_budget([_packed_sample(batch, i, size, share_prompts and size == 1) for i in chosen], budget)
    return [[chosen[i] for i in part] for part in bins]


def _packed_sample(batch: TrainBatch, index: int, size: int, share_prompts: bool) -> PackedSample:
    """As ``collate`` packs it: a rank by itself may share equal prompts, and ranks that share a sample pad it."""
    tokens, response = batch.tokens[index], batch.response_lengths[index]
    prompt = tokens[: len(tokens) - response]
    if share_prompts:
        return PackedSample(prompt.tobytes(), len(prompt), response)
    return PackedSample(index.to_bytes(8, "big"), len(prompt), padded_length(len(tokens), size) - len(prompt))
