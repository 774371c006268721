"""The arithmetic of ranks at every way to divide up to eight ranks, and twelve.

test_megatron_process_groups.py compares it with the groups that Megatron creates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from miles.base.flags import FlagError
from miles.types.dims import ParallelDims

WORLDS = (*range(1, 9), 12)


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def every_split() -> Iterator[ParallelDims]:
    """Tensor, pipeline and context parallel, static and dynamic, of every world."""
    for world in WORLDS:
        for tp in divisors(world):
            for pp in divisors(world // tp):
                dims = ParallelDims(world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
                yield replace(dims, dynamic_context_parallel=True)
                for size in divisors(world // tp // pp):
                    yield replace(dims, context_parallel_size=size)


def holders(dims: ParallelDims, token_rank: int) -> tuple[int, ...]:
    """Return the trainer ranks that hold shard ``token_rank`` of a step, ascending."""
    return tuple(rank for rank in range(dims.world_size) if dims.token_rank(rank) == token_rank)


def test_every_rank_belongs_to_one_group_of_each_kind() -> None:
    for dims in every_split():
        everyone = list(range(dims.world_size))
        sharing = [holders(dims, token_rank) for token_rank in range(dims.token_ranks)]
        for groups, count, size in (
            (sharing, dims.token_ranks, dims.model_parallel_size),
            (dims.token_groups, dims.model_parallel_size, dims.token_ranks),
            *((dims.context_groups(size), dims.world_size // size, size) for size in dims.context_sizes),
        ):
            assert sorted(rank for group in groups for rank in group) == everyone
            assert len(groups) == count and {len(group) for group in groups} == {size}
        assert list(dims.weight_groups) == sharing
        for group in dims.token_groups:
            assert [dims.token_rank(rank) for rank in group] == list(range(dims.token_ranks))
        for size in dims.context_sizes:  # a group shares the samples of one replica: consecutive shards
            for group in dims.context_groups(size):
                shards = [dims.token_rank(rank) for rank in group]
                assert shards == list(range(shards[0], shards[0] + size)) and shards[0] % size == 0
        of_replica = [dims.replica_of(token_rank) for token_rank in range(dims.token_ranks)]
        assert [of_replica.index(r) for r in range(dims.replicas)] == list(dims.first_token_ranks)
        assert [of_replica.count(r) for r in range(dims.replicas)] == [dims.context_parallel_size] * dims.replicas


def test_expert_parallelism_divides_the_ranks_of_a_stage() -> None:
    for world in WORLDS:
        for pp in divisors(world):
            for ep in divisors(world // pp):
                for etp in divisors(world // pp // ep):
                    dims = ParallelDims(
                        world,
                        pipeline_model_parallel_size=pp,
                        expert_model_parallel_size=ep,
                        expert_tensor_parallel_size=etp,
                    )
                    assert dims.ranks_per_stage * pp == world
                    assert dims.expert_replicas * ep * etp == dims.ranks_per_stage


def test_the_picture_of_the_docstring() -> None:
    dims = ParallelDims(8, context_parallel_size=2, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert (dims.token_ranks, dims.replicas) == (2, 1)
    assert [holders(dims, 0), holders(dims, 1)] == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert dims.token_groups == dims.context_groups(2) == ((0, 2), (1, 3), (4, 6), (5, 7))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (dict(tensor_model_parallel_size=0), ["--tensor-model-parallel-size 0", "at least 1"]),
        (dict(context_parallel_size=0), ["--context-parallel-size 0", "at least 1"]),
        (dict(tensor_model_parallel_size=3), ["--tensor-model-parallel-size 3", "8 trainer ranks"]),
        (
            dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=3),
            ["--pipeline-model-parallel-size 3", "times --tensor-model-parallel-size 2", "8 trainer ranks"],
        ),
        (
            dict(expert_model_parallel_size=4, expert_tensor_parallel_size=4),
            ["--expert-model-parallel-size 4", "--expert-tensor-parallel-size 4", "8 trainer ranks"],
        ),
        (
            dict(tensor_model_parallel_size=2, context_parallel_size=8),
            ["--context-parallel-size 8", "4 ranks that hold different tokens", "a divisor of 4"],
        ),
        (
            dict(context_parallel_size=2, dynamic_context_parallel=True),
            ["--context-parallel-size 2", "--dynamic-context-parallel", "keep one of the two"],
        ),
    ],
)
def test_a_split_that_is_not_possible_names_its_flag(sizes: dict[str, int], expected: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        ParallelDims(8, **sizes)  # type: ignore[arg-type]
    assert str(error.value).startswith(expected[0])
    assert all(words in str(error.value) for words in expected), error.value


def test_all_sizes_that_do_not_fit_are_named_at_once() -> None:
    with pytest.raises(FlagError) as error:
        ParallelDims(8, context_parallel_size=3, expert_model_parallel_size=5)
    assert [message.split(":")[0] for message in error.value.messages] == [
        "--expert-model-parallel-size 5",
        "--context-parallel-size 3",
    ]
    with pytest.raises(FlagError) as error:
        ParallelDims(8, tensor_model_parallel_size=3, context_parallel_size=3)
    assert len(error.value.messages) == 1, "what depends on the tensor-parallel size is not reported alongside it"
