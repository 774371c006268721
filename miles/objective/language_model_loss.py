"""Which loss a language model is trained on: the one place where ``--loss-type`` is read for it."""

from __future__ import annotations

import torch

from miles.objective.output import LossOutput
from miles.objective.policy_objective import policy_loss_function
from miles.objective.settings import LossArguments
from miles.objective.sft import sft_loss_function
from miles.train_batch import MicroBatch


def reads_entropy(loss: LossArguments) -> bool:
    """Whether ``language_model_loss`` is to be given the entropy."""
    return loss.loss_type == "policy_loss"


def language_model_loss(
    loss: LossArguments,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    canary: torch.Tensor | None,
) -> LossOutput:
    """Of one micro-batch, from what a backend's model makes of it: ``log_probs`` and ``entropy`` [R]."""
    if loss.loss_type == "sft_loss":
        return sft_loss_function(loss, micro, log_probs, canary)
    return policy_loss_function(loss, micro, log_probs, entropy, canary)
