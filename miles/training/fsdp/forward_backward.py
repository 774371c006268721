"""One step's gradient: the plain sum over this rank's micro-batches and over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from miles.arguments.loss import LossArguments
from miles.batching.collate import collate, split_by_sample
from miles.loss.aggregation import is_per_token
from miles.loss.output import LossOutput
from miles.loss.policy_loss import policy_loss_function
from miles.loss.sft_loss import sft_loss_function
from miles.tracking.metrics import Metric
from miles.train_batch import MicroBatch, TrainShard
from miles.training.fsdp.policy import Policy


def forward_backward(policy: Policy, shard: TrainShard, loss: LossArguments, device: torch.device) -> dict[str, Metric]:
    """Backward through every micro-batch. The metrics are the step's, the same on every rank."""
    totals: dict[str, torch.Tensor] = {}
    for indices in shard.micro_batches:
        output = _loss_of(policy, collate(shard.batch, indices, device), loss)
        output.loss.backward()
        _add(totals, output)
    with scoring(policy):
        for indices in shard.score_only:
            _add(totals, _loss_of(policy, collate(shard.batch, indices, device), loss))
    return _reduce(totals, shard, loss)


@contextmanager
def scoring(policy: Policy) -> Iterator[None]:
    """Forward passes without a graph. FSDP frees gathered weights in the backward pass; here it is told at the end."""
    with torch.no_grad():
        yield
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _loss_of(policy: Policy, micro: MicroBatch, loss: LossArguments) -> LossOutput:
    log_probs, entropy = policy(micro, with_entropy=loss.loss_type == "policy_loss")
    if loss.loss_type == "sft_loss":
        return sft_loss_function(loss, micro, log_probs)
    return policy_loss_function(loss, micro, log_probs, entropy)


def _add(totals: dict[str, torch.Tensor], output: LossOutput) -> None:
    for name, value in output.metrics.items():
        totals[name] = totals[name] + value if name in totals else value


def log_probs_of(policy: Policy, shard: TrainShard, device: torch.device) -> list[np.ndarray]:
    """Log-probs of each sample's response, float32 [response], without a graph."""
    by_sample: dict[int, np.ndarray] = {}
    with scoring(policy):
        for indices in (*shard.micro_batches, *shard.score_only):
            micro = collate(shard.batch, indices, device)
            log_probs, _ = policy(micro, with_entropy=False)
            by_sample |= zip(indices, split_by_sample(log_probs, micro), strict=True)
    return [by_sample[i] for i in range(len(shard.batch))]


def _reduce(totals: dict[str, torch.Tensor], shard: TrainShard, loss: LossArguments) -> dict[str, Metric]:
    """Sum the weighted numerators over ranks, all in one collective; weigh each by the step's own count.

    The numerators already hold the step's 1/N (or 1/T), so their sum is the step's value. Multiplied by that count
    again, the metrics of several steps add up to the value over all of them.
    """
    names = sorted(totals)
    packed = torch.stack([totals[name].detach().float() for name in names])
    dist.all_reduce(packed)
    batch = shard.batch
    count = batch.num_loss_tokens if is_per_token(loss) else batch.num_rollouts
    return {name: Metric(value * count, float(count)) for name, value in zip(names, packed.tolist(), strict=True)}
