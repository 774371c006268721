"""Supervised fine-tuning: the negative log-likelihood of the response, aggregated like the policy loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.objective.aggregation import aggregation_formula, get_pg_loss_reducer
from miles.objective.loss_types.base import LossType, Objective
from miles.objective.output import LossOutput, PolicyScores
from miles.objective.registry import Needs, Term
from miles.objective.token_weights import SWITCHES

if TYPE_CHECKING:
    import torch

    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


class SftLoss(LossType):
    """Fine-tune on saved answers, which are neither sampled, scored nor clipped."""

    name = "sft_loss"
    summary = "supervised fine-tuning"
    uses_advantages = False
    loss_mass_is_known = True
    lacks = (
        "advantage_estimator",
        "policy_loss",
        "kl_coef",
        "use_kl_loss",
        "entropy_coef",
        "kl_target",
        "entropy_target",
        "custom_advantage_function_path",
        "custom_policy_loss_function_path",
        *SWITCHES,
    )

    def needs_of(self, objective: Objective) -> Needs:
        """Return nothing: only the current log-probs are read."""
        return Needs()

    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the mean and the loss of a token."""
        token_loss = Term("l_it = -log p(token t of sample i)", __name__)
        return [*aggregation_formula("loss", objective.flags, shape), token_loss]

    def words(self, objective: Objective) -> str:
        """Name the likelihood."""
        return "the negative log-likelihood"

    def language_model_loss(self, objective: Objective, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Compute the negative log-likelihood of one micro-batch."""
        return sft_loss_function(objective.flags, micro, scores.log_probs, scores.canary)


def sft_loss_function(
    loss: LossArguments, micro: MicroBatch, log_probs: torch.Tensor, canary: torch.Tensor | None = None
) -> LossOutput:
    """Reduce ``-log_probs`` [R] of the loss tokens by ``--loss-aggregation``."""
    token_losses = -log_probs if canary is None else canary - log_probs
    negative_log_likelihood = get_pg_loss_reducer(loss, micro)(token_losses)
    return LossOutput(negative_log_likelihood, {"loss": negative_log_likelihood.detach()})
