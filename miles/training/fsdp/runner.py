"""Run micro-batches through a sharded model. Gradients are plain sums over micro-batches and ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Generic

import torch
from torch.distributed.fsdp import FSDPModule

from miles.base.spans import span
from miles.batch.collate import collate
from miles.models.routers import Routers
from miles.training.backend import LossFunction, Result, Scorer, StepSums
from miles.training.fsdp.adapter import without_adapter
from miles.training.fsdp.models import ShardedModule
from miles.training.fsdp.optimizer import ShardedOptimizer
from miles.types.groups import ContextGroups
from miles.types.train_batch import MicroBatch, MicroBatchPlan, TrainShard


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
            found = []
            for number, (plan, micro) in enumerate(zip(plans, self._collated(shard, plans), strict=True)):
                records = nullcontext() if self._recorded is None else self._recorded.first_pass(plan)
                with span(f"micro-batch {number}: score"), records:
                    found.append(function(micro, self.module.scorer(micro)))
        self.module.train(was_training)
        # FSDP frees gathered weights in the backward pass; there was none, or one rank keeps them (shard_model).
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return found

    def _collated(self, shard: TrainShard, plans: Sequence[MicroBatchPlan]) -> Iterator[MicroBatch]:
        for plan in plans:
            context = self._groups.of(plan.context_parallel_size)
            multiple = 1 if plan.padded else None
            with span("collate"):
                micro = collate(shard.batch, plan.samples, self._device, context, row_multiple=multiple)
            yield micro if self._recorded is None else replace(micro, experts=self._recorded.of(plan, self._device))


class RecordedExperts:
    """The experts that the policy chose in its first pass over each micro-batch of an iteration, in host memory.

    A micro-batch has the same layout in every pass, so its tokens are in the same places. Entries are removed when
    their plans are no longer used.
    """

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._of_plan: dict[int, torch.Tensor] = {}

    def of(self, plan: MicroBatchPlan, device: torch.device) -> torch.Tensor | None:
        """Return the experts of a micro-batch, int16 [T, layers, k]; None before its first pass."""
        found = self._of_plan.get(id(plan))
        return None if found is None else found.to(device)

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
    """The model under an adapter, which is left out: as a reference it needs no weights of its own."""

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without the adapter, and with experts of its own choice."""
        own = replace(shard, batch=replace(shard.batch, experts=None))
        with without_adapter(self.module.language_model):
            return super().forward(own, plans, function)


class FsdpTrainedModel(FsdpModel[Scorer]):
    """``TrainedModel`` for one rank."""

    def __init__(
        self,
        module: ShardedModule[Scorer],
        optimizer: ShardedOptimizer,
        groups: ContextGroups,
        device: torch.device,
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
