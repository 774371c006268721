"""Megatron's process groups, and this rank's position in them."""

from dataclasses import dataclass

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from miles.types.dims import ParallelDims
from miles.types.groups import ContextGroups


@dataclass(frozen=True)
class Ranks:
    """The groups that this rank works in. Expert groups divide the same ranks in another way.

    Megatron does not know about context parallelism: to it, ranks that share a sequence are data-parallel ranks, whose
    gradients are summed like all others. The sequence is shared in attention (packed_tokens.py) and in the loss.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    token_group: dist.ProcessGroup  # hold the same weights and different tokens; data-parallel ranks to Megatron
    ep: dist.ProcessGroup
    expert_tp: dist.ProcessGroup
    context: ContextGroups

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the head and the loss."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def last_stage(self) -> int:
        """The global rank of the last stage of this rank's pipeline."""
        return dist.get_global_rank(self.pp, self.pp.size() - 1)


def initialize_process_groups(dims: ParallelDims, seed: int) -> Ranks:
    """Divide the ranks of the default process group as ``dims`` states, and seed Megatron's random states.

    Collective. Megatron's groups are created once per process; another call returns the same ones.
    """
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=dims.tensor_model_parallel_size,
            pipeline_model_parallel_size=dims.pipeline_model_parallel_size,
            expert_model_parallel_size=dims.expert_model_parallel_size,
            expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
            create_gloo_process_groups=False,  # only for a checkpoint format that miles does not write
        )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    token_group = parallel_state.get_data_parallel_group()
    assert tuple(dist.get_process_group_ranks(token_group)) in dims.token_groups, "Megatron numbers the ranks otherwise"
    return Ranks(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        token_group=token_group,
        ep=parallel_state.get_expert_model_parallel_group(),
        expert_tp=parallel_state.get_expert_tensor_parallel_group(),
        context=ContextGroups(dims),
    )
