"""Run micro-batches through a sharded model. Gradients are plain sums over micro-batches and ranks."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Generic

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from miles.base.profiling import span
from miles.batch.collate import collate
from miles.config.optimizer import OptimizerArguments
from miles.models.routers import Routers
from miles.training.backend import LossFunction, Result, Scorer, StepSums
from miles.training.fsdp.adapter import without_adapter
from miles.training.fsdp.models import ShardedModule, local_part
from miles.training.optimizer import ScheduledOptimizer
from miles.types.groups import ContextGroups
from miles.types.train_batch import MicroBatch, MicroBatchPlan, TrainShard

# AdamW over sharded parameters, and clipping by the global norm.


class ShardedOptimizer(ScheduledOptimizer):
    """fp32 AdamW on this rank's shards. Weight decay applies to matrices only, not to norms and biases."""

    def __init__(
        self, model: nn.Module, settings: OptimizerArguments, total_steps: int, rate_flag: str = "--lr"
    ) -> None:
        super().__init__(settings, total_steps, rate_flag)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        decayed = {name: p for name, p in named.items() if _is_matrix(name, p)}
        others = {name: p for name, p in named.items() if name not in decayed}
        groups = [
            {"params": [*decayed.values()], "weight_decay": settings.weight_decay},
            {"params": [*others.values()], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            fused=True,
        )
        self._parameters = [*named.values()]

    def to(self, device: torch.device) -> None:
        """Move the moments to ``device``, as the parameters were moved; there are no gradients between steps."""
        for state in self.adam.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = value.to(device)

    def _gradient_norm(self) -> float:
        gradients = (torch.atleast_1d(local_part(p.grad)) for p in self._parameters if p.grad is not None)
        # The norm of each row, in fp32, reads a gradient once and takes no memory.
        norms = [torch.linalg.vector_norm(g, dim=-1, dtype=torch.float32) for g in gradients]
        square = torch.stack([of_rows.square().sum() for of_rows in norms]).sum()
        dist.all_reduce(square)
        return math.sqrt(square.item()) if torch.isfinite(square) else float(square.item())

    def _clip_and_update(self, norm: float) -> None:
        clip = self.settings.clip_grad
        if clip > 0 and norm > clip:
            torch._foreach_mul_([local_part(p.grad) for p in self._parameters if p.grad is not None], clip / norm)
        self.adam.step()

    def _clear(self) -> None:
        self.adam.zero_grad()


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix. In gpt_oss the biases of a layer's experts are the rows of one tensor."""
    return parameter.ndim >= 2 and not name.endswith("bias")


class FsdpModel(Generic[Scorer]):
    """``ScoredModel`` (training/backend.py) for one rank. ``module`` is sharded already."""

    def __init__(self, module: ShardedModule[Scorer], groups: ContextGroups, device: torch.device) -> None:
        self.module = module
        self._groups = groups
        self._device = device
        self._recorded: RecordedExperts | None = None  # --use-routing-replay

    def record_experts(self, routers: Routers) -> None:
        """From now on, use the experts of the first pass over a micro-batch in the later ones too."""
        self._recorded = RecordedExperts(routers)

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without a graph, and without dropout; returns what ``function`` makes of each micro-batch."""
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            results = []
            for number, (plan, micro) in enumerate(zip(plans, self._collated(shard, plans), strict=True)):
                records = nullcontext() if self._recorded is None else self._recorded.first_pass(plan)
                with span(f"micro-batch {number}: score"), records:
                    results.append(function(micro, self.module.scorer(micro)))
        self.module.train(was_training)
        # FSDP frees gathered weights in the backward pass; there was none, or one rank keeps them (shard_model).
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return results

    def _collated(self, shard: TrainShard, plans: Sequence[MicroBatchPlan]) -> Iterator[MicroBatch]:
        for plan in plans:
            context = self._groups.of(plan.context_parallel_size)
            multiple = 1 if plan.padded else None
            with span("collate"):
                micro = collate(shard.batch, plan.samples, self._device, context, row_multiple=multiple)
            yield micro if self._recorded is None else replace(micro, experts=self._recorded.of(plan, self._device))


class RecordedExperts:
    """The experts that the policy chose in its first pass over each micro-batch of an iteration, in host memory.

    A micro-batch has the same layout in every pass, so its tokens are at the same positions. Entries are removed when
    their plans are no longer used.
    """

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._of_plan: dict[int, torch.Tensor] = {}

    def of(self, plan: MicroBatchPlan, device: torch.device) -> torch.Tensor | None:
        """Return the experts of a micro-batch, int16 [T, layers, k]; None before its first pass."""
        experts = self._of_plan.get(id(plan))
        return None if experts is None else experts.to(device)

    @contextmanager
    def first_pass(self, plan: MicroBatchPlan) -> Iterator[None]:
        """Record the experts of the block's pass over ``plan``, unless they are known."""
        if id(plan) in self._of_plan:
            yield
            return
        with self._routers.recording():
            yield
        self._of_plan[id(plan)] = self._routers.take().to(torch.int16).cpu()
        weakref.finalize(plan, self._of_plan.pop, id(plan), None)


class FsdpBaseModel(FsdpModel[Scorer]):
    """The model under an adapter, which is left out: as a reference it needs no separate weights."""

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without the adapter, and with the experts that its own routers choose."""
        without_experts = replace(shard, batch=replace(shard.batch, experts=None))
        with without_adapter(self.module.language_model):
            return super().forward(without_experts, plans, function)


class FsdpTrainedModel(FsdpModel[Scorer]):
    """``TrainedModel`` for one rank."""

    def __init__(
        self, module: ShardedModule[Scorer], optimizer: ShardedOptimizer, groups: ContextGroups, device: torch.device
    ) -> None:
        super().__init__(module, groups, device)
        self.optimizer = optimizer

    def forward_backward(self, shard: TrainShard, loss_function: LossFunction[Scorer]) -> StepSums:
        """Run backward through every micro-batch, then score those that are not trained on."""
        watched = shard.expected_loss_mass is not None
        metrics = []
        for number, micro in enumerate(self._collated(shard, shard.micro_batches)):
            with span(f"micro-batch {number}: forward"):
                output = loss_function(micro, self.module.scorer(micro, watched))
            with span(f"micro-batch {number}: backward"):
                output.loss.backward()
            metrics.append(output.metrics)
        scored = self.forward(shard, shard.score_only, lambda micro, scorer: loss_function(micro, scorer).metrics)
        return StepSums([*metrics, *scored])

    def take_loss_mass(self) -> torch.Tensor | None:
        """Return this rank's part of the canary's gradient, and clear it."""
        return self.module.take_loss_mass()
