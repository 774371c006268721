"""The critic's loss: the squared distance from the returns, clipped like the policy's ratio."""

from __future__ import annotations

import torch

from miles.objective.aggregation import is_per_token
from miles.objective.output import LossOutput
from miles.objective.reducers import get_sum_of_sample_mean
from miles.objective.settings import LossArguments
from miles.train_batch import MicroBatch


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token losses and whether each was clipped (0/1, without graph); all [R], fp32.

    ``max((V - G)^2, (V_clipped - G)^2)`` with V_clipped within ``value_clip`` of the old values (PPO's reference
    implementation, https://github.com/openai/baselines ppo2/model.py), without its factor of 1/2.
    """
    change = (values - old_values).clamp(-value_clip, value_clip)
    plain, clipped = (values - returns).square(), (old_values + change - returns).square()
    return torch.maximum(plain, clipped), (clipped > plain).float().detach()


def value_loss_function(loss: LossArguments, micro: MicroBatch, values: torch.Tensor) -> LossOutput:
    """The value loss of one micro-batch from the critic's ``values`` [R], fp32.

    Reduced by the default reducer, whatever ``--loss-aggregation`` says of pg_loss: the mean over the tokens of each
    rollout, then over rollouts, or the mean over the step's tokens under ``token_mean``.
    """
    assert micro.values is not None and micro.returns is not None, "the critic learns from values and returns"
    reduce = get_sum_of_sample_mean(micro, is_per_token(loss))
    # A masked token may hold anything; NaN would reach the gradient through the square.
    hole = micro.loss_mask == 0
    current, old, returns = (x.float().masked_fill(hole, 0.0) for x in (values, micro.values, micro.returns))
    losses, clipped = compute_value_loss(current, old, returns, loss.value_clip)
    value_loss = reduce(losses)
    metrics = {"value_loss": value_loss, "value_clipfrac": reduce(clipped)}
    return LossOutput(value_loss, {name: value.detach() for name, value in metrics.items()})
