"""Supervised fine-tuning: the negative log-likelihood of the response, aggregated like the policy loss."""

from __future__ import annotations

import torch

from miles.objective.aggregation import get_pg_loss_reducer
from miles.objective.output import LossOutput
from miles.objective.settings import LossArguments
from miles.train_batch import MicroBatch


def sft_loss_function(
    loss: LossArguments, micro: MicroBatch, log_probs: torch.Tensor, canary: torch.Tensor | None = None
) -> LossOutput:
    """``-log_probs`` [R] of the unmasked response tokens, reduced as ``--loss-aggregation`` says."""
    token_losses = -log_probs if canary is None else canary - log_probs
    negative_log_likelihood = get_pg_loss_reducer(loss, micro)(token_losses)
    return LossOutput(negative_log_likelihood, {"loss": negative_log_likelihood.detach()})
