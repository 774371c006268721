"""The arithmetic of the trainer's ranks: who shares weights, who shares tokens, and which shard of a step goes where.

Ranks are numbered as Megatron-Core numbers them: tensor parallel fastest, then the ranks that hold different tokens,
then pipeline stages. With 8 ranks, ``--tensor-model-parallel-size 2`` and ``--pipeline-model-parallel-size 2``::

                 token rank 0    token rank 1
    stage 0          0  1            2  3
    stage 1          4  5            6  7

A column shares tokens: its ranks receive the same shard of every step. Within a row, the ranks at the same place of
their column ([0, 2], [1, 3], [4, 6], [5, 7]) hold the same weights and different tokens: a token group. Consecutive
ranks of a token group share the sequences of a micro-batch under context parallelism.

Megatron does not know about context parallelism. Its data-parallel ranks are all ranks of a token group, including
those that share a sequence. A "data-parallel size" would therefore be ambiguous, and there is none here:
``token_ranks`` is Megatron's, ``replicas`` is the number of groups that work on different samples.

Experts divide the ranks of a stage in another way: expert tensor parallel fastest, then expert parallel, then copies.
FSDP has neither tensor nor pipeline parallel: all of its ranks are token ranks.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm

import numpy as np

from miles.base.flags import Errors, collect_errors, count


def possible_sizes(ranks: int) -> list[int]:
    """Return the powers of two that divide ``ranks``, ascending: the sizes of dynamic context parallelism.

    >>> possible_sizes(12)
    [1, 2, 4]
    """
    return [1 << power for power in range(ranks.bit_length()) if ranks % (1 << power) == 0]


@dataclass(frozen=True)
class ParallelDims:
    """How ``world_size`` trainer ranks are divided. Fields have the names of the flags that set them.

    Building one checks it: raises ``ValueError`` naming the flag, its value, the rule and what to do.
    """

    world_size: int
    context_parallel_size: int = 1
    dynamic_context_parallel: bool = False
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None  # None: the tensor-parallel size

    def __post_init__(self) -> None:
        assert self.world_size >= 1, "--actor-num-nodes and --actor-num-gpus-per-node are checked first"
        with collect_errors() as errors:
            for name in (field.name for field in fields(self) if field.name.endswith("_size")):
                size = getattr(self, name)
                if size is not None and size < 1:
                    errors.refuse(name, size, "must be a finite number of at least 1", "give 1 or more")
            if not errors.messages:
                self._check_weights(errors)
            if not errors.messages:  # both depend on how the weights are divided
                self._check_experts(errors)
                self._check_context(errors)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the dense weights, and share their tokens."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def token_ranks(self) -> int:
        """Ranks that hold different tokens. A step is cut into one shard for each."""
        return self.world_size // self.model_parallel_size

    @property
    def replicas(self) -> int:
        """Groups of ranks that work on different samples, where every micro-batch has ``context_parallel_size``."""
        return self.token_ranks // self.context_parallel_size

    @property
    def ranks_per_stage(self) -> int:
        """Ranks of a pipeline stage; stage s begins at rank ``s * ranks_per_stage``."""
        return self.world_size // self.pipeline_model_parallel_size

    def token_rank(self, rank: int) -> int:
        """Return which of the ``token_ranks`` shards of a step trainer rank ``rank`` holds."""
        return rank // self.tensor_model_parallel_size % self.token_ranks

    def replica_of(self, token_rank: int) -> int:
        """Return which of the ``replicas`` token rank ``token_rank`` belongs to."""
        return token_rank // self.context_parallel_size

    @property
    def first_token_ranks(self) -> range:
        """The first token rank of each of the ``replicas``."""
        return range(0, self.token_ranks, self.context_parallel_size)

    @property
    def token_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same weights and different tokens, in the order of their token ranks.

        Every rank is in one of them: stage by stage, and in a stage by tensor-parallel rank.
        """
        tp, stage = self.tensor_model_parallel_size, self.ranks_per_stage
        return tuple(
            tuple(range(first + shard, first + stage, tp))
            for first in range(0, self.world_size, stage)
            for shard in range(tp)
        )

    @property
    def weight_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that share their tokens and hold one copy of the dense weights, in the order of their token rank.

        Every rank is in one of them.
        """
        tp = self.tensor_model_parallel_size
        stages = range(0, self.world_size, self.ranks_per_stage)
        return tuple(
            tuple(stage + token_rank * tp + shard for stage in stages for shard in range(tp))
            for token_rank in range(self.token_ranks)
        )

    @property
    def context_sizes(self) -> tuple[int, ...]:
        """The context-parallel sizes that a micro-batch may have, ascending."""
        if self.dynamic_context_parallel:
            return tuple(possible_sizes(self.token_ranks))
        return (self.context_parallel_size,)

    def context_groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return the ranks that share the sequences of a micro-batch of context-parallel size ``size``.

        Every rank is in one of them: the token groups in order, each cut into consecutive ranks.
        """
        assert self.token_ranks % size == 0, f"{self.token_ranks} ranks cannot be cut into groups of {size}"
        return tuple(
            ranks[start : start + size] for ranks in self.token_groups for start in range(0, self.token_ranks, size)
        )

    @property
    def ranks_per_expert_matrix(self) -> int:
        """Ranks that share each matrix of an expert."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Copies of each expert in a pipeline stage."""
        return self.ranks_per_stage // (self.expert_model_parallel_size * self.ranks_per_expert_matrix)

    def _check_weights(self, errors: Errors) -> None:
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for name, size, product in (
            ("tensor_model_parallel_size", tp, ""),
            ("pipeline_model_parallel_size", tp * pp, f"times --tensor-model-parallel-size {tp} "),
        ):
            if self.world_size % size:
                rule = (
                    f"{product}must divide the {count(self.world_size, 'trainer rank')} "
                    "(--actor-num-nodes x --actor-num-gpus-per-node)"
                )
                what_to_do = self._more_ranks() or f"give sizes whose product divides {self.world_size}"
                errors.refuse(name, getattr(self, name), rule, what_to_do)
                return

    def _check_experts(self, errors: Errors) -> None:
        ep, etp, pp = self.expert_model_parallel_size, self.ranks_per_expert_matrix, self.pipeline_model_parallel_size
        if self.world_size % (ep * etp * pp):
            chosen = "" if self.expert_tensor_parallel_size else " (by default the size for all tensors)"
            rule = (
                f"times --expert-tensor-parallel-size {etp}{chosen} times --pipeline-model-parallel-size {pp} "
                f"must divide the {count(self.world_size, 'trainer rank')}"
            )
            what_to_do = self._more_ranks() or "give sizes that divide them"
            errors.refuse("expert_model_parallel_size", ep, rule, what_to_do)

    def _check_context(self, errors: Errors) -> None:
        size = self.context_parallel_size
        if self.dynamic_context_parallel and size > 1:
            rule = "fixes what --dynamic-context-parallel chooses for each micro-batch"
            errors.refuse("context_parallel_size", size, rule, "keep one of the two")
        elif self.token_ranks % size:
            holds = "holds" if self.token_ranks == 1 else "hold"
            rule = (
                f"must divide the {count(self.token_ranks, 'rank')} that {holds} different tokens "
                "(all trainer ranks, over tensor and pipeline)"
            )
            what_to_do = self._more_ranks() or f"give a divisor of {self.token_ranks}"
            errors.refuse("context_parallel_size", size, rule, what_to_do)

    def _more_ranks(self) -> str:
        """Return how a run of one rank gets as many as its sizes need; nothing if it has several already."""
        if self.world_size > 1:
            return ""
        of_tokens = self.model_parallel_size * self.context_parallel_size
        of_experts = self.expert_model_parallel_size * self.ranks_per_expert_matrix * self.pipeline_model_parallel_size
        return f"give --actor-num-gpus-per-node {lcm(of_tokens, of_experts)} (on CPU too)"


# The arithmetic of the trainer's ranks: who shares weights, who shares tokens, and which shard of a step goes where.
#
# Ranks are numbered as Megatron-Core numbers them: tensor parallel fastest, then the ranks that hold different tokens,
# then pipeline stages. With 8 ranks, ``--tensor-model-parallel-size 2`` and ``--pipeline-model-parallel-size 2``::
#
#                  token rank 0    token rank 1
#     stage 0          0  1            2  3
#     stage 1          4  5            6  7
#
# A column shares tokens: its ranks receive the same shard of every step. Within a row, the ranks at the same place of
# their column ([0, 2], [1, 3], [4, 6], [5, 7]) hold the same weights and different tokens: a token group. Consecutive
# ranks of a token group share the sequences of a micro-batch under context parallelism.
#
# Megatron does not know about context parallelism. Its data-parallel ranks are all ranks of a token group, including
# those that share a sequence. A "data-parallel size" would therefore be ambiguous, and there is none here:
# ``token_ranks`` is Megatron's, ``replicas`` is the number of groups that work on different samples.
#
# Experts divide the ranks of a stage in another way: expert tensor parallel fastest, then expert parallel, then copies.
# FSDP has neither tensor nor pipeline parallel: all of its ranks are token ranks.

# Zig-zag context parallelism: the positions of a shared sequence that each rank of a group holds.
#
# A sequence is padded to a multiple of ``2 * size`` and cut into ``2 * size`` chunks. Rank r holds chunk r and its
# mirror
# image, chunk ``2 * size - 1 - r``. A late chunk attends to many keys and an early one to few, so every rank has the
# same
# work. Llama 3 (arXiv 2407.21783 §3.3.2) and Megatron-Core's ``get_batch_on_this_cp_rank`` use the same layout.


def padded_length(length: int, size: int) -> int:
    """Return how many tokens a sequence of ``length`` takes on all ``size`` ranks together, padding included.

    >>> padded_length(5, 1), padded_length(5, 2), padded_length(8, 2)
    (5, 8, 8)
    """
    return length if size == 1 else -(-length // (2 * size)) * 2 * size


def zigzag_chunks(size: int, rank: int) -> tuple[int, int]:
    """Return which two of the ``2 * size`` chunks of a sequence ``rank`` holds, ascending."""
    return rank, 2 * size - 1 - rank


def zigzag_positions(length: int, size: int, rank: int) -> np.ndarray:
    """Return the positions that ``rank`` of ``size`` holds, ascending; int64 [padded_length / size].

    Positions from ``length`` on are padding.

    >>> [zigzag_positions(7, 2, rank).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    if size == 1:
        return np.arange(length, dtype=np.int64)
    chunk = padded_length(length, size) // (2 * size)
    return np.concatenate(
        [np.arange(c * chunk, (c + 1) * chunk, dtype=np.int64) for c in zigzag_chunks(size, rank)],
    )


def gathered_index(lengths: Sequence[int], size: int) -> np.ndarray:
    """Return the index of every position of every sequence in the packed tokens of all ranks, rank after rank.

    int64 [sum of padded lengths], sequence after sequence, each in the order of its positions.

    >>> gathered_index([7], 2).tolist()
    [0, 1, 4, 5, 6, 7, 2, 3]
    """
    local = [padded_length(length, size) // size for length in lengths]
    starts = np.concatenate([[0], np.cumsum(local)]).astype(np.int64)
    parts = []
    for length, start, held in zip(lengths, starts, local, strict=False):
        where = np.empty(padded_length(length, size), np.int64)
        for rank in range(size):
            where[zigzag_positions(length, size, rank)] = rank * starts[-1] + start + np.arange(held)
        parts.append(where)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


# Dynamic context parallelism: every micro-batch is divided among as few ranks as its longest sequence needs.
#
# Under a static size, short sequences are cut as finely as the longest one of the run needs, and exchange keys and
# values
# for nothing. Here every micro-batch has its own size, a power of two. The ranks form groups of that size, and each
# group
# has its own sequences. Every token is still on exactly one rank, so the loss does not depend on the sizes.


@dataclass(frozen=True)
class GroupedMicroBatch:
    """One micro-batch on all ranks: ``groups[g]`` are the sequences of ranks ``g * size`` to ``(g + 1) * size - 1``."""

    size: int
    groups: list[list[int]]


def plan_dynamic_context_parallel(
    lengths: Sequence[int], ranks: int, max_seqlen_per_rank: int
) -> list[GroupedMicroBatch]:
    """Cut sequences of ``lengths`` into micro-batches of at most ``max_seqlen_per_rank`` tokens per rank.

    The longest remaining sequence sets the size: the smallest that can hold it. Shorter sequences fill the rest of the
    budget, each in the group with the fewest tokens. If there are fewer sequences than groups, the size is doubled
    until every group has one, as far as the budget allows.

    Raises:
        ValueError: The largest group cannot hold a sequence.

    >>> plan_dynamic_context_parallel([16, 3, 3, 2, 2, 2], ranks=4, max_seqlen_per_rank=4)
    [GroupedMicroBatch(size=4, groups=[[0]]), GroupedMicroBatch(size=1, groups=[[1], [2], [3, 5], [4]])]
    """
    sizes = possible_sizes(ranks)
    left = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan = []
    while left:
        size = _smallest_size(lengths[left[0]], sizes, max_seqlen_per_rank)
        groups, later = _fill(left, lengths, size, ranks // size, max_seqlen_per_rank)
        placed = sorted((i for group in groups for i in group), key=lambda i: (-lengths[i], i))
        while len(placed) < ranks // size and size < sizes[-1]:
            wider, rest = _fill(placed, lengths, 2 * size, ranks // (2 * size), max_seqlen_per_rank)
            if rest:  # padding for wider groups exceeds the budget: leave a group empty
                break
            size, groups = 2 * size, wider
        plan.append(GroupedMicroBatch(size, groups))
        left = later
    return plan


def _smallest_size(length: int, sizes: Sequence[int], max_seqlen_per_rank: int) -> int:
    for size in sizes:
        if padded_length(length, size) <= max_seqlen_per_rank * size:
            return size
    raise ValueError(
        f"--max-seqlen-per-dp-cp-rank {max_seqlen_per_rank}: a sequence of {length} tokens does not fit on "
        f"{sizes[-1]} ranks, the most that can share a sequence; give at least {-(-length // (2 * sizes[-1])) * 2}, "
        "or shorten prompts and responses"
    )


def _fill(
    candidates: Sequence[int], lengths: Sequence[int], size: int, groups: int, max_seqlen_per_rank: int
) -> tuple[list[list[int]], list[int]]:
    """Put ``candidates``, longest first, each into the group with the fewest tokens.

    Returns:
        The groups, and the candidates that do not fit.
    """
    chosen: list[list[int]] = [[] for _ in range(groups)]
    loads = [(0, group) for group in range(groups)]
    later = []
    for index in candidates:
        load, group = loads[0]
        load += padded_length(lengths[index], size)
        if load <= max_seqlen_per_rank * size:
            heapq.heapreplace(loads, (load, group))
            chosen[group].append(index)
        else:
            later.append(index)
    return chosen, later
