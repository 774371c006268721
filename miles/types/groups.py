"""Exchanges between ranks, and the process groups of context parallelism, created before the first step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from miles.types.dims import ParallelDims

Positioned = TypeVar("Positioned", bound=tuple[Any, ...])  # the first entry is a position in the step


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what each rank of ``group`` (None: all ranks) has, in the order of the ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def gather_step(samples: list[Positioned], group: dist.ProcessGroup | None) -> list[Positioned]:
    """Return what all ranks of ``group`` (None: all ranks) have for their samples, in the order of the step.

    Collective. Each sample is sent by one rank (``TrainShard.samples_sent_by``).
    """
    parts = gather_objects(samples, group)
    return sorted((sample for part in parts for sample in part), key=lambda sample: sample[0])


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the sequences of a micro-batch, as seen by one of them. The default is a single rank."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` summed over the group, the same on every rank; without a graph. Collective."""
        values = values.detach()
        if self.size > 1 and values.numel():
            values = values.clone()
            dist.all_reduce(values, group=self.group)
        return values

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [T, ...] of all ranks end to end, [size * T, ...]. Collective.

        Backward, the gradient is summed over the ranks in fp32.
        """
        if self.size == 1:
            return values
        apply: Callable[..., torch.Tensor] = _Gather.apply
        return apply(values, self)


ALONE = ContextGroup()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, context: ContextGroup) -> torch.Tensor:
        ctx.context = context
        gathered = values.new_empty(context.size * len(values), *values.shape[1:])
        dist.all_gather_single(gathered, values.contiguous(), group=context.group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        dtype = torch.promote_types(grad.dtype, torch.float32)
        mine = grad.new_empty(len(grad) // ctx.context.size, *grad.shape[1:], dtype=dtype)
        dist.reduce_scatter_single(mine, grad.to(dtype).contiguous(), group=ctx.context.group)
        return mine.to(grad.dtype), None


class ContextGroups:
    """This rank's group of every size that a micro-batch may have."""

    def __init__(self, dims: ParallelDims) -> None:
        """Create the groups. Collective: every rank creates every group, in the same order."""
        me = dist.get_rank()
        self._groups = {1: ALONE}
        for size in dims.context_sizes:
            if size == 1:
                continue
            for members in dims.context_groups(size):
                group = dist.new_group(list(members))
                if me in members:
                    self._groups[size] = ContextGroup(size, members.index(me), group)

    def of(self, size: int) -> ContextGroup:
        """Return the group where this rank works on a micro-batch of context-parallel size ``size``."""
        return self._groups[size]
