"""Train the critic: the squared distance of its values from the returns, clipped like the policy's ratio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.objective.aggregation import diagnostic_mode, get_sum_of_sample_mean, is_per_token
from miles.objective.output import LossOutput
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch

    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


def value_loss_formula(loss: LossArguments, shape: StepShape) -> list[Term]:
    """Return the loss that the critic minimizes. The mean is the default one, whatever the aggregation of pg_loss."""
    mode = diagnostic_mode(loss)
    clip = f"clip(V, V_old ± {loss.value_clip:g})"
    lines = [
        f"value_loss = {mode.formula.replace('l_it', 'v_it')}, N = {shape.num_trajectories}, {mode.symbols}",
        f"v_it = max((V - G)², ({clip} - G)²), G = A + V_old before any whitening, unless G_t is given",
    ]
    if shape.critic_only_iterations:
        lines.append(f"the first {shape.critic_only_iterations} iterations train the critic alone")
    return [Term(line, __name__) for line in lines]


def compute_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute per-token losses and whether each was clipped (0/1, without graph); all [R], fp32.

    ``max((V - G)^2, (V_clipped - G)^2)`` with V_clipped within ``value_clip`` of the old values (PPO's reference
    implementation, https://github.com/openai/baselines ppo2/model.py), without its factor of 1/2.
    """
    within = values.clamp(old_values - value_clip, old_values + value_clip)  # exactly the value, if that is within
    plain, clipped = (values - returns).square(), (within - returns).square()
    return plain.maximum(clipped), (clipped > plain).float().detach()


def value_loss_function(loss: LossArguments, micro: MicroBatch, values: torch.Tensor) -> LossOutput:
    """Compute the value loss of one micro-batch from the critic's ``values`` [R], fp32.

    Reduced by the default reducer, whatever ``--loss-aggregation`` pg_loss has: the mean over the tokens of each
    trajectory, then over trajectories, or the mean over the step's tokens under ``token_mean``.
    """
    assert micro.values is not None and micro.returns is not None, "the critic learns from values and returns"
    reduce = get_sum_of_sample_mean(micro, is_per_token(loss))
    # A masked token may hold anything; NaN would reach the gradient through the square.
    masked = micro.loss_mask == 0
    current, old, returns = (x.float().masked_fill(masked, 0.0) for x in (values, micro.values, micro.returns))
    losses, clipped = compute_value_loss(current, old, returns, loss.value_clip)
    value_loss = reduce(losses)
    metrics = {"value_loss": value_loss, "value_clipfrac": reduce(clipped)}
    return LossOutput(value_loss, {name: value.detach() for name, value in metrics.items()})
