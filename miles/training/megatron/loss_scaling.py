"""Return a micro-batch's share of the loss to Megatron's schedule, so that gradients are plain sums.

The loss functions return shares whose sum over micro-batches and ranks is the step's loss (docs/loss-aggregation.md).
Megatron averages on the way, in one of two ways, and this is the one place that cancels it. versions.py has the lines
of the framework that are cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from miles.objective.output import LossOutput
from miles.training.megatron.process_groups import Ranks
from miles.training.megatron.versions import average_of_ddp, average_of_schedule
from miles.types.train_batch import MicroBatch, TrainShard

Metrics = dict[str, torch.Tensor]
ScheduleLoss = tuple[torch.Tensor | Metrics, ...]  # what the schedule's loss function returns


class MegatronLossScaling(Protocol):
    """One contract with the schedule. Made for one pass over a step; called once per micro-batch, in order."""

    @property
    def auxiliary_loss_factor(self) -> float:
        """The factor of a loss that does not pass through the schedule (moe/auxiliary.py)."""
        ...

    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the tuple of this contract."""
        ...


@dataclass
class AveragingScaling:
    """``calculate_per_token_loss`` off: the two-tuple ``(loss, metrics)``.

    The schedule and the data-parallel reduction multiply by constants that are known beforehand; the loss is divided by
    them.
    """

    num_micro_batches: int
    token_ranks: int

    @property
    def auxiliary_loss_factor(self) -> float:
        """Cancel the data-parallel average alone."""
        return 1.0 / average_of_ddp(self.token_ranks)

    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the loss before both averages."""
        average = average_of_schedule(self.num_micro_batches) * average_of_ddp(self.token_ranks)
        return output.loss / average, output.metrics


@dataclass
class PerTokenScaling:
    """``calculate_per_token_loss`` on: the three-tuple ``(loss, tokens, metrics)``.

    Megatron divides gradients by the tokens that all ranks and micro-batches report (``finalize_model_grads``). They
    add up to T, the loss tokens of the step, so the loss is multiplied by T: under ``token_mean``, whose shares hold
    1/T, that is the plain sum of token losses. ``scored_tokens`` are those of samples that are not trained on; they are
    reported once, with the first micro-batch.
    """

    num_loss_tokens: int
    scored_tokens: int

    @property
    def auxiliary_loss_factor(self) -> float:
        """T: gradients of every loss are divided by it."""
        return float(self.num_loss_tokens)

    def __call__(self, output: LossOutput, micro: MicroBatch) -> ScheduleLoss:
        """Return the loss times T, with the loss tokens of this rank."""
        tokens = micro.loss_mask.sum().int() + self.scored_tokens
        self.scored_tokens = 0
        return output.loss * self.num_loss_tokens, tokens, output.metrics


def scaling_of(shard: TrainShard, per_token: bool, ranks: Ranks, micro_batches: int) -> MegatronLossScaling:
    """Return the contract that ``calculate_per_token_loss`` selects, for one pass over ``shard``.

    ``micro_batches`` are those that the schedule runs, empty ones among them.
    """
    if not per_token:
        return AveragingScaling(micro_batches, ranks.token_group.size())
    return PerTokenScaling(shard.batch.num_loss_tokens, _scored_tokens(shard, ranks))


def _scored_tokens(shard: TrainShard, ranks: Ranks) -> int:
    """Count the loss tokens of ``score_only``; of ranks that share a sample, the first counts them all."""
    masks = shard.batch.loss_masks
    firsts = (plan for plan in shard.score_only if ranks.context.of(plan.context_parallel_size).rank == 0)
    return sum(int(masks[i].sum()) for plan in firsts for i in plan.samples)
