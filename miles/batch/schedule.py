"""The schedule of a step, made before the batch is split: which ranks train a sample, and in which micro-batch.

``ShardBuilder`` schedules an iteration, ``schedule_step`` one of its steps. packing.py fills micro-batches of a token
budget, partition.py divides samples over ranks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from miles.base.input_error import InputError
from miles.batch.convert import Supports, convert, num_trajectories
from miles.batch.packing import PackedSamples, pack_shares, rows_by_budget
from miles.batch.partition import balanced_partition
from miles.batch.reward_post_process import RewardPostProcess
from miles.config.parallel import ParallelArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.canary import CanarySchedule
from miles.objective.chosen import build_objective
from miles.types.context_parallel import padded_length
from miles.types.dynamic_context_parallel import plan_dynamic_context_parallel
from miles.types.sample import PromptGroup
from miles.types.train_batch import MicroBatchPlan, TrainBatch, TrainShard

Plans = list[list[MicroBatchPlan]]  # one list per rank


class ShardBuilder:
    """Convert the scored groups of each iteration and schedule its steps.

    It has all settings: a step depends on the objective, its size, the rank arithmetic, the cutting of micro-batches,
    the losses inside the model, and the iterations in which the critic learns alone.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._canary = CanarySchedule(settings.loss)
        path = settings.reward.custom_reward_post_process_path
        self._supports: Supports = "if given"
        if settings.rollout.no_support_replay:
            self._supports = "left out"
        elif settings.rollout.replays_support and not settings.is_given_samples:
            self._supports = "required"
        self._advantages_of = None if path is None else RewardPostProcess(path, settings)

    def build(self, iteration: int, groups: Sequence[PromptGroup]) -> list[list[TrainShard]]:
        """Schedule one iteration. Iterations come in order: the canary may watch the first step only.

        Args:
            iteration: The iteration, counted from 0.
            groups: Its scored groups.

        Returns:
            For each token rank its shards, one per optimizer step.

        Raises:
            InputError: Saved samples are more or fewer than those of an iteration.
            ValueError: See ``convert``.
        """
        settings = self._settings
        is_dynamic = settings.training.use_dynamic_global_batch_size
        if settings.rollout.loads_samples and not is_dynamic:
            self._check_count(iteration, groups)
        batches = convert(
            groups,
            loss=settings.loss,
            global_batch_size=None if is_dynamic else settings.global_batch_size,
            advantages_of=self._advantages_of,
            reward_weights=settings.reward.weights,
            supports=self._supports,
            with_experts=settings.rollout.use_rollout_routing_replay,
        )
        objective = build_objective(settings.loss)
        inside_model = settings.megatron.has_auxiliary_loss  # MoE balancing or MTP: every sample has a gradient
        steps = []
        for batch in batches:
            steps.append(
                schedule_step(
                    batch,
                    settings.dims.token_ranks,
                    settings.training,
                    settings.parallel,
                    None if inside_model else objective.samples_with_gradient(batch.rewards),
                    watch_mass=settings.trains_policy(iteration) and self._canary.is_due(batch),
                    # ``collate`` shares prompts only if the engine chose the same experts for them.
                    share_prompts=not (settings.megatron.mtp_heads or settings.rollout.use_rollout_routing_replay),
                )
            )
        return [list(of_rank) for of_rank in zip(*steps, strict=True)]

    def _check_count(self, iteration: int, groups: Sequence[PromptGroup]) -> None:
        collected, wanted = sum(map(num_trajectories, groups)), self._settings.trajectories_per_iteration
        if collected != wanted:
            raise InputError(
                f"--load-debug-rollout-data {self._settings.rollout.load_debug_rollout_data}: iteration {iteration} "
                f"has {collected} trajectories, and --rollout-batch-size x --n-samples-per-prompt is {wanted}; give "
                "these flags as in the run that saved them, or train one step on all with "
                "--use-dynamic-global-batch-size"
            )


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Pause the collector while many objects are created, none of them in a cycle: it would visit them repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def schedule_step(
    batch: TrainBatch,
    ranks: int,
    training: TrainingArguments,
    parallel: ParallelArguments,
    has_gradient: Sequence[bool] | None = None,
    watch_mass: bool = False,
    share_prompts: bool = True,
) -> list[TrainShard]:
    """Return one shard per rank.

    Every rank gets the same number of micro-batches, because each is a collective operation. Which rank and which
    micro-batch a sample is in cannot change the gradient: its weight travels with it.

    Args:
        batch: The whole step.
        ranks: How many ranks hold different tokens (data parallel times context parallel).
        training: The flags of batch sizes and budgets.
        parallel: The flags of context parallelism and layout.
        has_gradient: For each sample, whether its loss has a gradient; None: all have. Samples without one are in
            micro-batches of their own, which are scored without a backward pass.
        watch_mass: Whether the loss-mass canary watches the step. Then every sample gets a backward pass.
        share_prompts: Whether the token budget counts equal prompts of a micro-batch once. ``collate`` may lay out
            fewer tokens still: it also shares equal starts of responses. With ``--qkv-format bshd`` the budget counts
            the padding of rows instead.
    """
    trained = [i for i in range(len(batch)) if has_gradient is None or has_gradient[i]]
    scored = [i for i in range(len(batch)) if has_gradient is not None and not has_gradient[i]]
    if parallel.dynamic_context_parallel:
        assert parallel.max_seqlen_per_dp_cp_rank is not None, "validate() requires it"
        plans = [_dynamic(batch, part, ranks, parallel.max_seqlen_per_dp_cp_rank) for part in (trained, scored)]
    else:
        plans = _static(batch, [trained, scored], ranks, training, parallel, share_prompts)
    to_train, to_score = plans
    mass = batch.expected_loss_mass if watch_mass else None
    if watch_mass:
        # The micro-batches stay as they are in an unwatched step, so that watching changes no rounding.
        to_train, to_score = [[*a, *b] for a, b in zip(to_train, to_score, strict=True)], [[] for _ in to_score]
    if not to_train[0]:
        to_train = [[MicroBatchPlan(())] for _ in range(ranks)]
    # Ranks that share all of their sequences use the same shard object.
    together = 1 if parallel.dynamic_context_parallel else parallel.context_parallel_size
    firsts = range(0, ranks, together)
    samples = [sorted({i for plan in (*to_train[rank], *to_score[rank]) for i in plan.samples}) for rank in firsts]
    parts = batch.divide(samples)
    shards = [
        _shard(own, part, mass, to_train[rank], to_score[rank])
        for rank, own, part in zip(firsts, samples, parts, strict=True)
    ]
    return [shards[rank // together] for rank in range(ranks)]


def _shard(
    samples: list[int],
    part: TrainBatch,
    mass: float | None,
    to_train: list[MicroBatchPlan],
    to_score: list[MicroBatchPlan],
) -> TrainShard:
    """Return the shard of ``part``, which has ``samples`` of the step, with plans of positions in it."""
    position = {sample: i for i, sample in enumerate(samples)}

    def local(plans: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        return [
            MicroBatchPlan(tuple(position[i] for i in plan.samples), plan.context_parallel_size, plan.padded)
            for plan in plans
        ]

    return TrainShard(part, local(to_train), local(to_score), mass)


def _static(
    batch: TrainBatch,
    kinds: Sequence[list[int]],
    ranks: int,
    training: TrainingArguments,
    parallel: ParallelArguments,
    share_prompts: bool,
) -> list[Plans]:
    """Plan one context-parallel size: consecutive ranks are a replica, which has one share of the samples."""
    size, padded = parallel.context_parallel_size, parallel.pads
    replicas = ranks // size
    lengths = batch.total_lengths
    shares = balanced_partition(lengths, replicas) if training.balance_data else _in_order(len(batch), replicas)
    packed = None
    if training.use_dynamic_batch_size and not padded:
        packed = _packed_samples(batch, size, share_prompts and size == 1)  # once for all kinds
    plans: list[Plans] = []
    for kind in kinds:
        chosen = shares
        if len(kind) < len(batch):
            wanted = set(kind)
            chosen = [[i for i in share if i in wanted] for share in shares]
        per_replica = _micro_batches(lengths, chosen, training, size, packed)
        count = max(len(micro_batches) for micro_batches in per_replica)
        cut = [split_to_count(micro_batches, count) for micro_batches in per_replica]
        of_replica = [[MicroBatchPlan(tuple(part), size, padded) for part in parts] for parts in cut]
        plans.append([of_replica[rank // size] for rank in range(ranks)])
    return plans


def _dynamic(batch: TrainBatch, chosen: Sequence[int], ranks: int, max_seqlen_per_rank: int) -> Plans:
    """Plan dynamic context parallelism: each micro-batch uses all ranks, in groups with samples of their own."""
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
    """Return ``n`` indices in ``parts`` runs whose sizes differ by at most one."""
    bounds = [n * part // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _micro_batches(
    lengths: Sequence[int],
    shares: Sequence[list[int]],
    training: TrainingArguments,
    size: int,
    packed: PackedSamples | None,
) -> list[list[list[int]]]:
    """Return the micro-batches of each share.

    Args:
        lengths: Tokens of each sample of the step.
        shares: The samples of each replica.
        training: The flags of batch sizes and budgets.
        size: How many ranks share a micro-batch.
        packed: The samples, if a token budget counts them packed; None: it counts the padding of rows.
    """
    if not training.use_dynamic_batch_size:
        count = training.micro_batch_size
        return [[share[i : i + count] for i in range(0, len(share), count)] for share in shares]
    assert training.max_tokens_per_gpu is not None, "validate() requires it"
    budget = training.max_tokens_per_gpu * size
    if packed is not None:
        return pack_shares(packed, shares, budget)
    bins = [rows_by_budget([lengths[i] for i in share], budget) for share in shares]
    return [[[share[i] for i in part] for part in parts] for share, parts in zip(shares, bins, strict=True)]


def _packed_samples(batch: TrainBatch, size: int, share_prompts: bool) -> PackedSamples:
    """Describe samples as ``collate`` packs them: a single rank may share equal prompts, several ranks pad them."""
    response = np.asarray(batch.response_lengths, np.int64)
    total = np.asarray(batch.total_lengths, np.int64)
    if share_prompts:
        pairs = zip(batch.tokens, (total - response).tolist(), strict=True)
        prompts = [tokens[:length].tobytes() for tokens, length in pairs]
        number = {prompt: i for i, prompt in enumerate(sorted(set(prompts)))}
        mine = np.fromiter(map(number.__getitem__, prompts), np.int64, len(prompts))
        return PackedSamples(mine, total - response, response)
    padded = np.asarray([padded_length(length, size) for length in total.tolist()], np.int64)
    return PackedSamples(np.arange(len(total)), total - response, padded - (total - response))


def split_to_count(bins: Sequence[list[int]], count: int) -> list[list[int]]:
    """Cut ``bins`` until there are ``count``: halve the one with most samples; add empty ones if nothing can be halved.

    No bin grows, so a bin within a budget stays within it.
    """
    parts = [list(part) for part in bins]
    while len(parts) < count:
        largest = max(range(len(parts)), key=lambda b: len(parts[b]), default=None)
        middle = 0 if largest is None else len(parts[largest]) // 2
        if largest is None or middle == 0:
            parts.append([])
        else:
            parts.append(parts[largest][middle:])
            parts[largest] = parts[largest][:middle]
    return parts
