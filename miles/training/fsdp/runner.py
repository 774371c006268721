"""One step's gradient: the plain sum over this rank's micro-batches and over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from miles.batching.collate import collate, split_by_sample
from miles.metrics import Metric
from miles.objective.aggregation import is_per_token
from miles.objective.chosen import build_objective
from miles.objective.output import LossOutput, add_metrics, reported
from miles.objective.settings import LossArguments
from miles.objective.value_loss import value_loss_function
from miles.parallel.groups import ContextGroups
from miles.train_batch import MicroBatch, MicroBatchPlan, TrainBatch, TrainShard
from miles.training.fsdp.policy import Policy, ValueModel


def forward_backward(
    policy: Policy | ValueModel, shard: TrainShard, loss: LossArguments, groups: ContextGroups, device: torch.device
) -> dict[str, Metric]:
    """Backward through every micro-batch. The metrics are the step's, the same on every rank.

    Which loss it is follows from the model: the critic's is the value loss, and has no canary.
    """
    totals: dict[str, torch.Tensor] = {}
    watched = shard.expected_loss_mass is not None
    for plan in shard.micro_batches:
        output = _loss_of(policy, _collate(shard, plan, groups, device), loss, watched)
        output.loss.backward()
        add_metrics(totals, output.metrics)
    with scoring(policy):
        for plan in shard.score_only:
            output = _loss_of(policy, _collate(shard, plan, groups, device), loss, watched=False)
            add_metrics(totals, output.metrics)
    mass = None
    if watched:
        assert isinstance(policy, Policy), "the critic's loss has no canary"
        mass = policy.canary.take_mass()
    return _reduce(totals, mass, shard.batch, loss)


def _collate(shard: TrainShard, plan: MicroBatchPlan, groups: ContextGroups, device: torch.device) -> MicroBatch:
    context = groups.of(plan.context_parallel_size)
    return collate(shard.batch, plan.samples, device, context, row_multiple=1 if plan.padded else None)


@contextmanager
def scoring(policy: Policy | ValueModel) -> Iterator[None]:
    """Forward passes without a graph. FSDP frees gathered weights in the backward pass; here it is told at the end."""
    with torch.no_grad():
        yield
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _loss_of(policy: Policy | ValueModel, micro: MicroBatch, loss: LossArguments, watched: bool) -> LossOutput:
    if isinstance(policy, ValueModel):
        return value_loss_function(loss, micro, policy(micro))
    objective = build_objective(loss)
    scores = policy(micro, with_entropy=objective.needs.entropy)
    canary = scores.canary if watched else None
    return objective.language_model_loss(micro, scores.log_probs, scores.entropy, canary)


def log_probs_of(policy: Policy, shard: TrainShard, groups: ContextGroups, device: torch.device) -> list[np.ndarray]:
    """Log-probs of each sample's whole response, float32 [response], without a graph."""
    return _by_sample(policy, lambda micro: policy(micro, with_entropy=False).log_probs, shard, groups, device)


def values_of(model: ValueModel, shard: TrainShard, groups: ContextGroups, device: torch.device) -> list[np.ndarray]:
    """Values of each sample's whole response, float32 [response], without a graph."""
    return _by_sample(model, model, shard, groups, device)


def _by_sample(
    model: Policy | ValueModel,
    score: Callable[[MicroBatch], torch.Tensor],
    shard: TrainShard,
    groups: ContextGroups,
    device: torch.device,
) -> list[np.ndarray]:
    by_sample: dict[int, np.ndarray] = {}
    with scoring(model):
        for plan in (*shard.micro_batches, *shard.score_only):
            micro = _collate(shard, plan, groups, device)
            by_sample |= zip(plan.samples, split_by_sample(score(micro), micro), strict=True)
    return [by_sample[i] for i in range(len(shard.batch))]


def _reduce(
    totals: dict[str, torch.Tensor], mass: torch.Tensor | None, batch: TrainBatch, loss: LossArguments
) -> dict[str, Metric]:
    """Sum over ranks, all in one collective; what the sums are worth is told in ``reported``."""
    names = sorted(totals)
    rows = [totals[name].detach().float() for name in names] + ([] if mass is None else [mass])
    packed = torch.stack(rows)
    dist.all_reduce(packed)
    sums = packed.tolist()
    metrics = reported(dict(zip(names, sums, strict=False)), batch, is_per_token(loss))
    return metrics if mass is None else metrics | {"loss_mass": Metric(sums[-1])}
