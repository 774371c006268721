"""One step's gradient: the plain sum over this rank's micro-batches and over all ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from miles.arguments.loss import LossArguments
from miles.batching.collate import collate, split_by_sample
from miles.loss.policy_loss import policy_loss_function
from miles.loss.sft_loss import sft_loss_function
from miles.tracking.metrics import Metric
from miles.train_batch import MicroBatch, TrainShard
from miles.training.fsdp.policy import Policy


def forward_backward(policy: Policy, shard: TrainShard, loss: LossArguments, device: torch.device) -> dict[str, Metric]:
    """Backward through every micro-batch. The metrics are the step's, the same on every rank."""
    totals: dict[str, torch.Tensor] = {}
    for indices in shard.micro_batches:
        micro = collate(shard.batch, indices, device)
        log_probs, entropy = policy(micro, with_entropy=loss.loss_type == "policy_loss")
        if loss.loss_type == "sft_loss":
            output = sft_loss_function(loss, micro, log_probs)
        else:
            output = policy_loss_function(loss, micro, log_probs, entropy)
        output.loss.backward()
        for name, value in output.metrics.items():
            totals[name] = totals[name] + value if name in totals else value
    return _reduce(totals, shard, loss)


def log_probs_of(policy: Policy, shard: TrainShard, device: torch.device) -> list:
    """Log-probs of each sample's response, float32 [response], without a graph."""
    by_sample: list = [None] * len(shard.batch)
    with torch.no_grad():
        for indices in shard.micro_batches:
            micro: MicroBatch = collate(shard.batch, indices, device)
            log_probs, _ = policy(micro, with_entropy=False)
            for i, part in zip(indices, split_by_sample(log_probs, micro), strict=True):
                by_sample[i] = part
    return by_sample


def _reduce(totals: dict[str, torch.Tensor], shard: TrainShard, loss: LossArguments) -> dict[str, Metric]:
    """Sum the weighted numerators over ranks, all in one collective; weigh each by the step's own count.

    The numerators already hold the step's 1/N (or 1/T), so their sum is the step's value. Multiplied by that count
    again, the metrics of several steps add up to the value over all of them.
    """
    names = sorted(totals)
    packed = torch.stack([totals[name].detach().float() for name in names])
    dist.all_reduce(packed)
    batch = shard.batch
    count = batch.num_loss_tokens if loss.loss_aggregation == "token_mean" else batch.num_rollouts
    return {
        name: Metric(value * count, float(count)) for name, value in zip(names, packed.tolist(), strict=True)
    }
