"""The output of a loss function, and how it is reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from miles.types.metrics import Metric

if TYPE_CHECKING:
    import torch

    from miles.types.train_batch import MicroBatch, TrainBatch


class PolicyScores(NamedTuple):
    """The loss's inputs from a language model. A tuple, because FSDP looks for tensors in what a module returns."""

    log_probs: torch.Tensor  # fp32 [R], of the micro-batch's targets
    entropy: torch.Tensor | None  # fp32 [R]
    canary: torch.Tensor | None = None  # fp32 scalar of value 0 (canary.py); None: not in this step's graph


@dataclass(frozen=True)
class TokenValues:
    """The values of each response token of ``micro`` that the loss reads: fp32 [R] without a graph.

    Attributes:
        micro: The micro-batch, or one with whole responses, whose layout the columns have.
        log_probs: The trainer's log-probs, before the iteration's first step; with ``--use-rollout-logprobs`` the
            current policy's.
        log_ratios: log current - log old; 0 for masked tokens.
        token_weights: The product of the factors of token_weights.py.
    """

    micro: MicroBatch
    log_probs: torch.Tensor
    log_ratios: torch.Tensor
    token_weights: torch.Tensor


@dataclass(frozen=True)
class LossOutput:
    """The part of the step's loss and metrics that one micro-batch contributes.

    Both are already weighted by the step's own counts: the plain sum over all micro-batches and ranks is the step's
    value (docs/loss-aggregation.md, "gradients are sums"). ``metrics`` are detached fp32 scalars, and their names
    depend on the settings only, so that every rank reports the same ones.
    """

    loss: torch.Tensor  # fp32 scalar with a graph, also when the micro-batch is empty
    metrics: dict[str, torch.Tensor]
    tokens: TokenValues | None = None  # of a policy loss


def add_metrics(totals: dict[str, torch.Tensor], metrics: Mapping[str, torch.Tensor]) -> None:
    """Add the metrics of one micro-batch to ``totals``, in place."""
    for name, value in metrics.items():
        totals[name] = totals[name] + value if name in totals else value


def reported(sums: Mapping[str, float], batch: TrainBatch, per_token: bool) -> dict[str, Metric]:
    """Make the metrics of a step from the sums of ``LossOutput.metrics`` over all its micro-batches and ranks.

    Means are over the step's trajectories, or ``per_token`` over its tokens. The sums hold 1 / count already; each is
    weighed by the count again, so that the metrics of several steps add up to the value over all of them.
    ``ess_ratio``, the effective sample size over the sample size (Kong 1992), is made of the two means that it needs,
    once both are whole. Trajectories without a loss token are in their count and not in their sum, so each is divided
    by ``is_ratio_weight``, the mean of ones. A step without a token has no metrics.
    """
    if not batch.num_loss_tokens:
        return {}
    count = batch.num_loss_tokens if per_token else batch.num_trajectories
    metrics = {name: Metric(value * count, float(count)) for name, value in sums.items()}
    if "is_ratio_square" in sums:
        del metrics["is_ratio_square"], metrics["is_ratio_weight"]
        metrics["ess_ratio"] = Metric(sums["is_ratio"] ** 2, sums["is_ratio_square"] * sums["is_ratio_weight"])
    return metrics
