"""Supervised fine-tuning: the negative log-likelihood of the response, aggregated like the policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.objective.aggregation import get_pg_loss_reducer
from miles.objective.corrections import CORRECTIONS
from miles.objective.estimators import ESTIMATORS
from miles.objective.output import LossOutput
from miles.objective.policy_losses import POLICY_LOSSES

if TYPE_CHECKING:
    import torch

    from miles.flags import Errors
    from miles.objective.settings import LossArguments
    from miles.train_batch import MicroBatch


def check_sft(loss: LossArguments, errors: Errors) -> None:
    """Refuse the flags of advantages and policy loss: saved answers are neither sampled, scored nor clipped."""
    ignored = (
        *("advantage_estimator", "policy_loss", "use_kl_loss", "entropy_coef", "get_mismatch_metrics"),
        *("custom_advantage_function_path", "custom_policy_loss_function_path", "custom_loss_function_path"),
        *ESTIMATORS.reads,
        *POLICY_LOSSES.reads,
        *(correction.switch for correction in CORRECTIONS),
    )
    errors.refuse_ignored(loss, ignored, "by --loss-type sft_loss", "use --loss-type policy_loss")


def sft_loss_function(
    loss: LossArguments, micro: MicroBatch, log_probs: torch.Tensor, canary: torch.Tensor | None = None
) -> LossOutput:
    """Reduce ``-log_probs`` [R] of the loss tokens as ``--loss-aggregation`` says."""
    token_losses = -log_probs if canary is None else canary - log_probs
    negative_log_likelihood = get_pg_loss_reducer(loss, micro)(token_losses)
    return LossOutput(negative_log_likelihood, {"loss": negative_log_likelihood.detach()})
