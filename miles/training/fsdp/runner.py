"""Run micro-batches through a sharded model. Gradients are plain sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic

import torch
from torch.distributed.fsdp import FSDPModule

from miles.batching.collate import collate
from miles.parallel.groups import ContextGroups
from miles.profiling.spans import span
from miles.train_batch import MicroBatch, MicroBatchPlan, TrainShard
from miles.training.backend import LossFunction, Result, Scorer, StepSums
from miles.training.fsdp.adapter import without_adapter
from miles.training.fsdp.models import ShardedModule
from miles.training.fsdp.optimizer import ShardedOptimizer


class FsdpModel(Generic[Scorer]):
    """``ScoredModel`` (training/backend.py) for one rank. ``module`` is sharded already."""

    def __init__(self, module: ShardedModule[Scorer], groups: ContextGroups, device: torch.device) -> None:
        self.module = module
        self._groups = groups
        self._device = device

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without a graph, and without dropout; returns what ``function`` makes of each micro-batch."""
        was_training = self.module.training
        self.module.eval()
        with torch.no_grad():
            found = []
            for number, micro in enumerate(self._collated(shard, plans)):
                with span(f"micro-batch {number}: score"):
                    found.append(function(micro, self.module.scorer(micro)))
        self.module.train(was_training)
        # FSDP frees gathered weights in the backward pass, and there was none.
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
            yield micro


class FsdpBaseModel(FsdpModel[Scorer]):
    """The model under an adapter, which is left out: as a reference it needs no weights of its own."""

    def forward(
        self, shard: TrainShard, plans: Sequence[MicroBatchPlan], function: Callable[[MicroBatch, Scorer], Result]
    ) -> list[Result]:
        """Run ``plans`` without the adapter."""
        with without_adapter(self.module.language_model):
            return super().forward(shard, plans, function)


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
