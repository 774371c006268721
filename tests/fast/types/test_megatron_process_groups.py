"""Compare ParallelDims with the process groups that Megatron creates, for every division of up to eight ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from miles.types.dims import ParallelDims


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def every_split(world: int) -> Iterator[ParallelDims]:
    for tp in divisors(world):
        for pp in divisors(world // tp):
            for ep in divisors(world // pp):
                for etp in (None, *divisors(world // pp // ep)):
                    if etp is not None or world % (ep * tp * pp) == 0:
                        yield ParallelDims(
                            world,
                            tensor_model_parallel_size=tp,
                            pipeline_model_parallel_size=pp,
                            expert_model_parallel_size=ep,
                            expert_tensor_parallel_size=etp,
                        )


def members(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


@pytest.mark.parametrize("world", [*range(1, 8), pytest.param(8, marks=pytest.mark.slow)])
def test_megatron_divides_the_ranks_in_the_same_way(world: int) -> None:
    splits = list(every_split(world))
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            for dims in splits:
                _compare(dims, rank)
        finally:
            dist.destroy_process_group()


def _compare(dims: ParallelDims, rank: int) -> None:
    from megatron.core import parallel_state  # slow to import, which every worker of pytest-xdist would do

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=dims.tensor_model_parallel_size,
        pipeline_model_parallel_size=dims.pipeline_model_parallel_size,
        expert_model_parallel_size=dims.expert_model_parallel_size,
        expert_tensor_parallel_size=dims.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    try:
        (tokens,) = (group for group in dims.token_groups if rank in group)
        assert members(parallel_state.get_data_parallel_group()) == tokens
        assert parallel_state.get_data_parallel_rank() == dims.token_rank(rank)
        holders = tuple(other for other in range(dims.world_size) if dims.token_rank(other) == dims.token_rank(rank))
        assert members(parallel_state.get_model_parallel_group()) == holders
        assert parallel_state.get_expert_tensor_parallel_world_size() == dims.ranks_per_expert_matrix
        shards = dims.expert_model_parallel_size * dims.ranks_per_expert_matrix * dims.pipeline_model_parallel_size
        assert parallel_state.get_expert_data_parallel_group().size() == dims.world_size // shards
    finally:
        parallel_state.destroy_model_parallel()
