"""Megatron's process groups, and where this rank stands in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles.arguments.megatron.settings import MegatronArguments
from miles.arguments.parallel import ParallelArguments
from miles.parallel.dynamic_context_parallel import possible_sizes
from miles.parallel.groups import ContextGroups


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and the groups it works in. Expert groups split the same ranks another way.

    Megatron is told nothing of context parallelism: to it, ranks that share a sequence are data-parallel ranks, whose
    gradients are added up like all others'. The sequence is shared in attention (packed_tokens.py) and in the loss.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup  # the ranks that hold different tokens
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    context: ContextGroups

    @property
    def is_first_stage(self) -> bool:
        """Whether the embedding is here."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the head and the loss are here."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def last_stage(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)


def initialize_process_groups(sizes: MegatronArguments, parallel: ParallelArguments, seed: int) -> Ranks:
    """Split the default process group as the flags say; every rank calls it. Megatron's groups are made only once.

    Ranks are numbered with tensor parallel fastest, then the ranks of different tokens, then pipeline (Megatron's own
    default order), so that a tensor-parallel group shares a node.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor_model_parallel_size,
            pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
            expert_model_parallel_size=sizes.expert_model_parallel_size,
            expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
            create_gloo_process_groups=False,  # for checkpoints in a format that is not written here
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Ranks(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
        context=_context_groups(sizes, parallel),
    )


def _context_groups(sizes: MegatronArguments, parallel: ParallelArguments) -> ContextGroups:
    """Of every size that a micro-batch may have, among the ranks that hold the same weights and different tokens."""
    tp, world = sizes.tensor_model_parallel_size, dist.get_world_size()
    stage = world // sizes.pipeline_model_parallel_size
    replicas = [list(range(first + t, first + stage, tp)) for first in range(0, world, stage) for t in range(tp)]
    dynamic = parallel.dynamic_context_parallel
    shared_by = possible_sizes(stage // tp) if dynamic else [parallel.context_parallel_size]
    return ContextGroups(shared_by, replicas)
