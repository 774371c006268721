"""Built-in objectives as a user would write them, with every hook except the reducer."""

from __future__ import annotations

import numpy as np
import torch

from miles.compat.losses import compute_policy_loss, get_log_probs_and_entropy
from miles.objective.hooks import (
    AdvantageSamples,
    AdvantageTrajectory,
    ImportanceInputs,
    LossInputs,
    PolicyLossInputs,
)


def ppo_losses(inputs: PolicyLossInputs) -> torch.Tensor:
    """Return PPO's token losses, with each token's ratio clipped."""
    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    bounded = ratio.clamp(1 - inputs.settings.eps_clip, 1 + (inputs.settings.eps_clip_high or inputs.settings.eps_clip))
    return torch.maximum(-inputs.advantages * ratio, -inputs.advantages * bounded)


ppo_losses.zero_advantage_has_gradient = False


def gspo_losses(inputs: PolicyLossInputs) -> torch.Tensor:
    """Use the ratio of whole sequences with its full gradient, where every token depends on every other."""
    losses = []
    for log_ratio, mask, advantages in zip(
        (inputs.log_probs - inputs.old_log_probs).split(inputs.response_lengths),
        inputs.loss_mask.split(inputs.response_lengths),
        inputs.advantages.split(inputs.response_lengths),
        strict=True,
    ):
        ratio = ((log_ratio * mask).sum() / mask.sum().clamp(min=1)).exp()
        bounded = ratio.clamp(1 - inputs.settings.eps_clip, 1 + inputs.settings.eps_clip)
        losses.append(torch.maximum(-advantages * ratio, -advantages * bounded))
    return torch.cat(losses)


def sequence_weights(inputs: ImportanceInputs) -> torch.Tensor:
    """Return truncated importance weights of whole sequences."""
    log_ratio = (inputs.old_log_probs - inputs.rollout_log_probs) * inputs.loss_mask
    of_sequence = torch.stack([part.sum() for part in log_ratio.split(inputs.response_lengths)])
    return of_sequence.exp().clamp(max=inputs.settings.tis_clip)[inputs.sample_index]


def whole_loss(inputs: LossInputs):
    """Return the policy gradient loss with an entropy bonus."""
    entropy = inputs.mean(inputs.entropy)
    total = inputs.reduce(ppo_losses(inputs)) - inputs.settings.entropy_coef * entropy
    return total, {"entropy_loss": entropy.detach()}


whole_loss.metrics = ("entropy_loss",)


def four_argument_loss(args, batch, logits, sum_of_sample_mean):
    """Return the same loss, written for a related launcher."""
    _, scores = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    log_probs = torch.cat(scores["log_probs"])
    entropy = sum_of_sample_mean(torch.cat(scores["entropy"]))
    losses, _ = compute_policy_loss(torch.cat(batch["log_probs"]) - log_probs, torch.cat(batch["advantages"]), 0.2)
    return sum_of_sample_mean(losses) - 0.01 * entropy, {"entropy_loss": entropy.detach()}


def twice_the_advantage(args, rollout_data) -> None:
    """Double the advantage of every token."""
    for advantages in rollout_data["advantages"]:
        advantages *= 2


def group_advantages(samples: AdvantageSamples) -> list[float]:
    """Return GRPO's advantages, for groups whose trajectories have one sample each."""
    advantages = []
    for reward, group in zip(samples.rewards, samples.group_indices, strict=True):
        others = [r for r, g in zip(samples.rewards, samples.group_indices, strict=True) if g == group]
        spread = np.std(others, ddof=1) + 1e-6 if len(others) > 1 else 1e-6
        advantages.append((reward - np.mean(others)) / spread)
    return advantages


def discounted(trajectories: list[AdvantageTrajectory]) -> list[np.ndarray]:
    """Return the discounted return of each token."""
    all_returns = []
    for trajectory in trajectories:
        gamma, returns, following = trajectory.settings.gamma, np.zeros(len(trajectory.rewards)), 0.0
        for t in reversed(range(len(returns))):
            returns[t] = following = trajectory.rewards[t] + gamma * following
        all_returns.append(returns)
    return all_returns
