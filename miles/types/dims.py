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

from __future__ import annotations

from dataclasses import dataclass, fields
from math import lcm

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
