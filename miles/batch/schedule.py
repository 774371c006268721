"""The schedule of a step, made before the batch is split: the ranks that train a sample, and its micro-batch.

``ShardBuilder`` schedules an iteration, ``schedule_step`` one of its steps. ``balanced_partition`` divides samples over
ranks, ``pack_shares`` fills micro-batches of a token budget.
"""

from __future__ import annotations

import gc
import heapq
from array import array
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from miles.base.text import InputError
from miles.batch.convert import RewardPostProcess, Supports, convert, num_trajectories
from miles.config.parallel import ParallelArguments
from miles.config.settings import Settings
from miles.config.training import TrainingArguments
from miles.objective.canary import CanarySchedule
from miles.objective.chosen import build_objective
from miles.types.parallel import padded_length, plan_dynamic_context_parallel
from miles.types.sample import PromptGroup
from miles.types.train_batch import MicroBatchPlan, TrainBatch, TrainShard

# Divide samples over ranks so that all have nearly the same number of tokens.


MANY = 8  # equal weights that are merged at once rather than one by one
WIDE = 64  # parts of a partition that are merged as arrays; for fewer a loop is faster


def _column(numbers: np.ndarray) -> array[int]:
    """Return ``numbers`` in a form that grows and gives single numbers fast; numpy reads it without a copy."""
    column = array("q")
    column.frombytes(numbers.astype(np.int64, copy=False).tobytes())
    return column


def _view(column: array[int]) -> np.ndarray:
    """Return the numbers of ``column``, which must not grow while they are used."""
    return np.frombuffer(column, np.int64)


@dataclass(slots=True)
class _Partition:
    """The parts that have an item, largest first; the others, up to the number of parts, are empty.

    ``sums`` are negative: they ascend, as ``bisect`` wants them. A part is named by the first of its items.
    """

    sums: array[int]
    first_items: array[int]

    def spread(self, parts: int) -> int:
        """Return the difference of the largest and the smallest of ``parts``."""
        return (self.sums[-1] if len(self.sums) == parts else 0) - self.sums[0]


class _Chains:
    """The items of all parts as chains, so that two parts are joined without a copy."""

    def __init__(self, items: int) -> None:
        self._following = _column(np.full(items, -1))
        self._last = _column(np.arange(items))  # of the chain that begins with an item
        self._followings, self._lasts = _view(self._following), _view(self._last)

    def join(self, one: int, other: int) -> int:
        """Return the name of both parts together."""
        self._following[self._last[one]] = other
        self._last[one] = self._last[other]
        return one

    def join_each(self, ones: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Join each of ``ones`` with the one of ``others`` at its index; return the names."""
        self._followings[self._lasts[ones]] = others
        self._lasts[ones] = self._lasts[others]
        return ones

    def items(self, name: int) -> list[int]:
        """Return the items of a part, in ascending order."""
        members = []
        while name >= 0:
            members.append(name)
            name = self._following[name]
        members.sort()
        return members


def balanced_partition(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Return indices of ``weights`` in ``parts`` lists of nearly equal sum; some are empty if there are more parts.

    This is the largest differencing method (Karmarkar and Karp, 1982): the two partitions whose largest and smallest
    parts differ most are merged, largest part with smallest, until one partition is left. At first every weight is a
    partition. Of equal differences the older partition goes first, so the result depends on the weights only.

    Weights are positive. With thousands of parts and a million weights, these keep it fast: empty parts are not stored;
    weights wait in one sorted column, as only merged partitions need the heap; a partition that remains the one with
    the largest difference takes weight after weight without going through the heap; equal weights are merged many at a
    time (``_equal_weights``), and partitions of many parts as arrays.
    """
    if not weights or parts == 1:
        return [list(range(len(weights))), *([] for _ in range(parts - 1))]
    column = np.asarray(weights, dtype=np.int64)
    assert column.min() > 0, "a part of weight 0 would be taken for an empty one"
    order = np.argsort(-column, kind="stable")
    items, waiting = _column(order), _column(-column[order])  # weights are negative, ascending
    chains = _Chains(len(items))
    at, end = 0, len(items)  # those before ``at`` are in partitions
    merged: list[tuple[int, int, _Partition]] = []  # a heap of (-spread, age, partition)
    age = 0
    while end - at + len(merged) > 1:
        equal = bisect_right(waiting, waiting[at], at) - at if at < end else 0
        if equal >= MANY and (not merged or waiting[at] < merged[0][0]):  # they come before everything else
            for names in _equal_weights(order[at : at + equal], parts):
                age += 1
                alike = _Partition(array("q", [waiting[at]]) * len(names), _column(names))
                heapq.heappush(merged, (waiting[at], age, alike))
            at += equal
            continue
        # A weight is older than every merged partition, and so goes first if the differences are equal.
        if at < end and (not merged or waiting[at] <= merged[0][0]):
            first = _Partition(waiting[at : at + 1], items[at : at + 1])
            at += 1
        else:
            first = heapq.heappop(merged)[2]
        least = merged[0][0] if merged else 0  # a weight of at least this is merged next
        if at == end or waiting[at] > least:
            first = _merge(first, heapq.heappop(merged)[2], parts, chains)
        while at < end and waiting[at] <= least:
            _add(first, waiting[at], items[at], parts, chains)
            at += 1
            room = parts - len(first.sums)
            if room and at < end and first.sums[0] < waiting[at]:  # it stays first until no part is empty
                taken = min(at + room, bisect_right(waiting, least, at))
                first.sums += waiting[at:taken]
                first.first_items += items[at:taken]
                at = taken
            if at < end and first.spread(parts) <= -waiting[at]:
                break
        age += 1
        heapq.heappush(merged, (-first.spread(parts), age, first))
    lists = [chains.items(name) for name in merged[0][2].first_items] if merged else [[items[0]]]
    return lists + [[] for _ in range(parts - len(lists))]


def _equal_weights(items: np.ndarray, parts: int) -> list[np.ndarray]:
    """Return the partitions that equal weights become among themselves, oldest first, each as the names of its parts.

    Every part has one item, so the difference of each partition is the weight. They are merged in rounds: oldest with
    second oldest, third with fourth, and so on; one that is left over is the oldest of the next round. A merger is the
    first partition's parts, then the second's in reverse order, as in ``_merge``: the array of all names stays as it
    is, but that every second partition in it is reversed. Rounds end when a merger would have no part empty.
    """
    sizes = np.ones(len(items), np.int64)
    while len(sizes) > 1:
        pairs = len(sizes) // 2
        merged = sizes[0 : 2 * pairs : 2] + sizes[1 : 2 * pairs : 2]
        if merged.max() >= parts:
            break
        ends = np.cumsum(sizes)
        whole = ends[2 * pairs - 1]  # the names of pairs
        reflect = np.repeat((2 * ends - sizes - 1)[: 2 * pairs], sizes[: 2 * pairs])
        is_second = np.repeat(np.arange(2 * pairs) % 2 == 1, sizes[: 2 * pairs])
        positions = np.arange(whole)
        paired = items[np.where(is_second, reflect - positions, positions)]
        items = np.concatenate([items[whole:], paired])
        sizes = np.concatenate([sizes[2 * pairs :], merged])
    return np.split(items, np.cumsum(sizes)[:-1])


def _add(partition: _Partition, weight: int, item: int, parts: int, chains: _Chains) -> None:
    """Put an item of a negative weight into the smallest part. Of equal parts, the changed one becomes the last."""
    sums, first_items = partition.sums, partition.first_items
    if len(sums) == parts:
        weight += sums.pop()
        item = chains.join(first_items.pop(), item)
    place = bisect_right(sums, weight)
    sums.insert(place, weight)
    first_items.insert(place, item)


def _merge(first: _Partition, second: _Partition, parts: int, chains: _Chains) -> _Partition:
    """Put the largest part of one with the smallest of the other, and so on.

    Of equal results the one with the larger part of ``first`` goes first.
    """
    a, b = first.sums, second.sums
    alone = min(len(a), parts - len(b))  # parts of first that meet an empty part of second
    left = parts - max(len(a), parts - len(b))  # parts of second that meet an empty part of first
    if len(a) + len(b) > WIDE:
        return _merge_wide(first, second, alone, left, parts, chains)
    sums, first_items = a[:alone], first.first_items[:alone]
    for i in range(alone, len(a)):
        sums.append(a[i] + b[parts - 1 - i])
        first_items.append(chains.join(first.first_items[i], second.first_items[parts - 1 - i]))
    sums += b[:left][::-1]
    first_items += second.first_items[:left][::-1]
    if len(a) + len(b) <= parts and a[0] == a[-1] == b[0] == b[-1]:  # equal weights, one in each part
        return _Partition(sums, first_items)
    order = sorted(range(len(sums)), key=sums.__getitem__)
    return _Partition(array("q", [sums[i] for i in order]), array("q", [first_items[i] for i in order]))


def _merge_wide(
    first: _Partition, second: _Partition, alone: int, left: int, parts: int, chains: _Chains
) -> _Partition:
    """Do what ``_merge`` does, with arrays."""
    a, b, a_named, b_named = map(_view, (first.sums, second.sums, first.first_items, second.first_items))
    met = slice(parts - len(a), parts - alone)  # of the second, by the first's parts from ``alone`` on, last first
    joined = chains.join_each(a_named[alone:], b_named[met][::-1])
    sums = np.concatenate([a[:alone], a[alone:] + b[met][::-1], b[:left][::-1]])
    first_items = np.concatenate([a_named[:alone], joined, b_named[:left][::-1]])
    order = np.argsort(sums, kind="stable")
    return _Partition(_column(sums[order]), _column(first_items[order]))


# Pack samples of known length into few micro-batches of a token budget.


@dataclass(frozen=True)
class PackedSamples:
    """The facts of samples that packing needs, as int64 columns [samples].

    Attributes:
        prompt: Which prompt a sample has. Samples of one prompt may share its tokens.
        prompt_length: Tokens of the prompt.
        response: Tokens of the response.
    """

    prompt: np.ndarray
    prompt_length: np.ndarray
    response: np.ndarray


def pack_shares(samples: PackedSamples, shares: Sequence[Sequence[int]], budget: int) -> list[list[list[int]]]:
    """Return bins of at most ``budget`` packed tokens for each share, by first-fit decreasing (Johnson, 1973).

    A prompt that is in a bin already costs nothing there, so samples of one prompt are taken one after another and
    prefer the bin of their prompt. A sample longer than the budget gets its own bin. Ties are broken by the
    numbers of prompts, then by the position in the share.

    Args:
        samples: All samples.
        shares: The samples of each share, as indices into ``samples``; so are those in the bins.
        budget: Packed tokens per bin.

    >>> group = PackedSamples(np.zeros(4, int), np.full(4, 30), np.full(4, 10))  # one prompt
    >>> pack_shares(group, [range(4)], 70), pack_shares(group, [range(4)], 60)
    ([[[0, 1, 2, 3]]], [[[0, 1, 2], [3]]])
    """
    sizes = np.array([len(share) for share in shares], np.int64)
    index = np.fromiter((i for share in shares for i in share), np.int64, int(sizes.sum()))
    share = np.repeat(np.arange(len(shares)), sizes)
    prompt, response = samples.prompt[index], samples.response[index]
    length = samples.prompt_length[index] + response
    longest = _largest_of_prompt(share, prompt, length)
    order = np.lexsort((-length, prompt, -longest, share))  # stable: ties keep their order
    ends = np.cumsum(sizes)
    taken = list(zip(*(column[order].tolist() for column in (index, prompt, length, response)), strict=True))
    return [_first_fit(taken[begin:end], budget) for begin, end in pairwise([0, *ends.tolist()])]


def _largest_of_prompt(share: np.ndarray, prompt: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return for each sample the length of the longest of its prompt and share."""
    if not len(length):
        return length
    order = np.lexsort((prompt, share))
    begins = np.flatnonzero(np.diff(prompt[order], prepend=-1) | np.diff(share[order], prepend=-1))
    largest = np.empty_like(length)
    largest[order] = np.repeat(np.maximum.reduceat(length[order], begins), np.diff(begins, append=len(length)))
    return largest


def _first_fit(samples: Sequence[tuple[int, int, int, int]], budget: int) -> list[list[int]]:
    """Put (index, prompt, length, response) into bins, in order; the samples of a prompt are adjacent.

    The cheapest bin is the one that has the prompt; of equal ones it is the first.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    least = min((length for _, _, length, _ in samples), default=0)
    open_bins: list[int] = []  # into which at least the shortest sample would fit
    holding: list[int] = []  # bins that have the prompt, in order
    current = None
    for index, prompt, length, response in samples:
        if prompt != current:
            current, holding = prompt, []
        chosen, cost = -1, response
        if response < length:
            for number in holding:
                if room[number] >= response:
                    chosen = number
                    break
        if chosen < 0:
            cost = length
            for number in open_bins:
                if room[number] >= length:
                    chosen = number
                    break
            else:
                chosen = len(bins)
                bins.append([])
                room.append(budget)
                open_bins.append(chosen)
            insort(holding, chosen)
        bins[chosen].append(index)
        room[chosen] -= cost
        if room[chosen] < least and chosen in open_bins:
            open_bins.remove(chosen)
    return bins


def rows_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return indices of ``lengths`` in bins of at most ``budget`` tokens, each padded to the longest of its bin.

    The longest come first, so that similar lengths share a bin. A sample longer than the budget gets its own bin.

    >>> rows_by_budget([10, 40, 38, 12, 9], 80)
    [[1, 2], [3, 0, 4]]
    """
    bins: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or (len(bins[-1]) + 1) * lengths[bins[-1][0]] > budget:
            bins.append([])
        bins[-1].append(index)
    return bins


Plans = list[list[MicroBatchPlan]]  # one list per rank


class ShardBuilder:
    """Convert the scored groups of each iteration and schedule its steps.

    It has all settings: a step depends on the objective, its size, the rank arithmetic, the cutting of micro-batches,
    the losses inside the model, and the iterations where the critic learns alone.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._canary = CanarySchedule(settings.loss)
        path = settings.reward.custom_reward_post_process_path
        self._supports: Supports = "if given"
        if settings.rollout.no_support_replay:
            self._supports = "left out"
        elif settings.rollout.replays_support and not settings.reads_samples:
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
            InputError: Saved samples are more or fewer than an iteration has.
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
    forward_only = [i for i in range(len(batch)) if has_gradient is not None and not has_gradient[i]]
    if parallel.dynamic_context_parallel:
        assert parallel.max_seqlen_per_dp_cp_rank is not None, "validate() requires it"
        plans = [_dynamic(batch, part, ranks, parallel.max_seqlen_per_dp_cp_rank) for part in (trained, forward_only)]
    else:
        plans = _static(batch, [trained, forward_only], ranks, training, parallel, share_prompts)
    to_train, to_score = plans
    mass = batch.expected_loss_mass if watch_mass else None
    if watch_mass:
        # The micro-batches stay unchanged in an unwatched step, so that watching changes no rounding.
        to_train = [[*trained_on, *scored] for trained_on, scored in zip(to_train, to_score, strict=True)]
        to_score = [[] for _ in to_score]
    if not to_train[0]:
        to_train = [[MicroBatchPlan(())] for _ in range(ranks)]
    # Ranks that share all of their sequences use the same shard object.
    together = 1 if parallel.dynamic_context_parallel else parallel.context_parallel_size
    firsts = range(0, ranks, together)
    samples = [sorted({i for plan in (*to_train[rank], *to_score[rank]) for i in plan.samples}) for rank in firsts]
    parts = batch.divide(samples)
    shards = [
        _shard(of_shard, part, mass, to_train[rank], to_score[rank])
        for rank, of_shard, part in zip(firsts, samples, parts, strict=True)
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
    return [list(range(begin, end)) for begin, end in pairwise(bounds)]


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
        rows = zip(batch.tokens, (total - response).tolist(), batch.images or [None] * len(batch), strict=True)
        seen: dict[int, int] = {}  # of images: equal tokens with other images are another prompt
        prompts = [(tokens[:n].tobytes(), seen.setdefault(id(images), len(seen))) for tokens, n, images in rows]
        number_of = {prompt: i for i, prompt in enumerate(sorted(set(prompts)))}
        numbers = np.fromiter(map(number_of.__getitem__, prompts), np.int64, len(prompts))
        return PackedSamples(numbers, total - response, response)
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
