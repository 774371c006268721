"""Megatron's process groups, and where this rank stands in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles.arguments.megatron import MegatronArguments


@dataclass(frozen=True)
class Ranks:
    """This rank's place, and the groups it works in. Expert groups split the same ranks another way."""

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    cp: dist.ProcessGroup
    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup

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


def initialize_process_groups(sizes: MegatronArguments, context_parallel_size: int, seed: int) -> Ranks:
    """Split the default process group as the flags say; every rank calls it. A second call gives the same groups.

    Ranks are numbered with tensor parallel fastest, then context, data, pipeline (Megatron's own default order), so
    that a tensor-parallel group shares a node.
    """
    if not parallel_state.model_parallel_is_initialized():
        _initialize(sizes, context_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Ranks(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        cp=parallel_state.get_context_parallel_group(),
        dp=parallel_state.get_data_parallel_group(),
        dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
    )


def _initialize(sizes: MegatronArguments, context_parallel_size: int) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor_model_parallel_size,
        pipeline_model_parallel_size=sizes.pipeline_model_parallel_size,
        context_parallel_size=context_parallel_size,
        expert_model_parallel_size=sizes.expert_model_parallel_size,
        expert_tensor_parallel_size=sizes.expert_tensor_parallel_size,
        create_gloo_process_groups=False,  # for checkpoints in a format that is not written here
    )
