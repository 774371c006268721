"""The schedule of a step, made before the batch is split: which ranks train a sample, and in which micro-batch.

``ShardBuilder`` schedules an iteration, ``schedule_step`` one of its steps. The other public functions pack samples of
known length: into few bins of a budget, or into k parts of equal weight.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from miles.arguments.parallel import ParallelArguments
from miles.arguments.settings import Settings
from miles.arguments.training import TrainingArguments
from miles.batching.convert import Supports, convert, num_trajectories
from miles.batching.reward_post_process import RewardPostProcess
from miles.input_error import InputError
from miles.objective.canary import CanarySchedule
from miles.objective.chosen import build_objective
from miles.parallel.context_parallel import padded_length
from miles.parallel.dynamic_context_parallel import plan_dynamic_context_parallel
from miles.sample import PromptGroup
from miles.train_batch import MicroBatchPlan, TrainBatch, TrainShard

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
        share_prompts: Whether the token budget counts equal prompts of a micro-batch once, as ``collate`` lays them
            out. With ``--qkv-format bshd`` it counts the padding of rows instead.
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
    return [_shard(batch, mass, *of_rank) for of_rank in zip(to_train, to_score, strict=True)]


def _shard(
    batch: TrainBatch, mass: float | None, to_train: list[MicroBatchPlan], to_score: list[MicroBatchPlan]
) -> TrainShard:
    """Return the samples that the plans name, with the plans in terms of positions in the shard."""
    samples = sorted({i for plan in (*to_train, *to_score) for i in plan.samples})
    position = {sample: i for i, sample in enumerate(samples)}

    def local(plans: list[MicroBatchPlan]) -> list[MicroBatchPlan]:
        return [replace(plan, samples=tuple(position[i] for i in plan.samples)) for plan in plans]

    return TrainShard(batch.select(samples), local(to_train), local(to_score), mass)


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
    batch: TrainBatch,
    chosen: Sequence[int],
    training: TrainingArguments,
    parallel: ParallelArguments,
    share_prompts: bool,
) -> list[list[int]]:
    if not training.use_dynamic_batch_size:
        count = training.micro_batch_size
        return [list(chosen[i : i + count]) for i in range(0, len(chosen), count)]
    assert training.max_tokens_per_gpu is not None, "validate() requires it"
    size = parallel.context_parallel_size
    budget = training.max_tokens_per_gpu * size
    if parallel.pads:
        bins = rows_by_budget([len(batch.tokens[i]) for i in chosen], budget)
    else:
        bins = pack_by_budget([_packed_sample(batch, i, size, share_prompts and size == 1) for i in chosen], budget)
    return [[chosen[i] for i in part] for part in bins]


class PackedSample(NamedTuple):
    """What packing needs of a sample: which prompt it has, and the tokens of prompt and response."""

    prompt: bytes  # samples of equal prompts may share its tokens
    prompt_length: int
    response: int

    @property
    def length(self) -> int:
        """Tokens of the sample if it shares nothing."""
        return self.prompt_length + self.response


def _packed_sample(batch: TrainBatch, index: int, size: int, share_prompts: bool) -> PackedSample:
    """Describe a sample as ``collate`` packs it: a single rank may share equal prompts, several ranks pad it."""
    tokens, response = batch.tokens[index], batch.response_lengths[index]
    prompt = tokens[: len(tokens) - response]
    if share_prompts:
        return PackedSample(prompt.tobytes(), len(prompt), response)
    return PackedSample(index.to_bytes(8, "big"), len(prompt), padded_length(len(tokens), size) - len(prompt))


def pack_by_budget(samples: Sequence[PackedSample], budget: int) -> list[list[int]]:
    """Return indices of ``samples`` in bins of at most ``budget`` packed tokens, by first-fit decreasing.

    A prompt that is in a bin already costs nothing there, so samples of one prompt are taken one after another and
    prefer the bin of their prompt. A sample longer than the budget gets a bin of its own. (Johnson, 1973.)

    >>> group = [PackedSample(b"p", 30, 10)] * 4
    >>> pack_by_budget(group, 70), pack_by_budget(group, 60)
    ([[0, 1, 2, 3]], [[0, 1, 2], [3]])
    """
    longest: dict[bytes, int] = {}
    for sample in samples:
        longest[sample.prompt] = max(longest.get(sample.prompt, 0), sample.length)
    order = sorted(
        range(len(samples)), key=lambda i: (-longest[samples[i].prompt], samples[i].prompt, -samples[i].length, i)
    )
    bins: list[list[int]] = []
    room: list[int] = []
    prompts: list[set[bytes]] = []
    for index in order:
        sample = samples[index]
        costs = (sample.response if sample.prompt in held else sample.length for held in prompts)
        fitting = [(cost, b) for b, (cost, left) in enumerate(zip(costs, room, strict=True)) if cost <= left]
        if fitting:
            cost, chosen = min(fitting)
        else:
            cost, chosen = sample.length, len(bins)
            bins.append([])
            room.append(budget)
            prompts.append(set())
        bins[chosen].append(index)
        room[chosen] -= cost
        prompts[chosen].add(sample.prompt)
    return bins


def rows_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of ``lengths`` in bins of at most ``budget`` tokens, each padded to the longest of its bin.

    The longest come first, so that similar lengths share a bin. A sample longer than the budget gets a bin of its own.

    >>> rows_by_budget([10, 40, 38, 12, 9], 80)
    [[1, 2], [3, 0, 4]]
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
            bins.append([])
        bins[-1].append(index)
    return bins


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


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return indices of ``weights`` in ``parts`` lists of nearly equal sum; some are empty if there are more parts.

    This is the largest differencing method (Karmarkar and Karp, 1982): the two partitions whose largest and smallest
    parts differ most are merged, largest part with smallest, until one partition is left.
    """
    if not weights:
        return [[] for _ in range(parts)]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for index, weight in enumerate(weights):
        empty: list[tuple[int, list[int]]] = [(0, []) for _ in range(parts - 1)]
        spread = weight if parts > 1 else 0
        heapq.heappush(heap, (-spread, index, [(weight, [index]), *empty]))
    ticket = len(weights)  # breaks ties, so that the result depends on the weights only
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], ticket, merged))
        ticket += 1
    return [sorted(items) for _, items in heap[0][2]]
