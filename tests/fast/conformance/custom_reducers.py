"""The sample mean as a user would write it, in both forms: --custom-pg-loss-reducer-function-path."""

from __future__ import annotations

import torch

from miles.objective.hooks import ReducerInputs


def typed(inputs: ReducerInputs):
    """One argument. Every rollout has one sample in the cases that use it."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(list(inputs.response_lengths))
        means = [(p * m).sum() / m.sum().clamp(min=1) for p, m in zip(parts, inputs.loss_masks, strict=True)]
        return torch.stack(means).sum() / inputs.num_trajectories

    return reduce


def positional(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Four arguments: the sum of sample means, divided by the launcher."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(response_lengths)
        return torch.stack([(p * m).sum() / m.sum().clamp(min=1) for p, m in zip(parts, loss_masks, strict=True)]).sum()

    return reduce


def mean_of_samples_seen(inputs: ReducerInputs):
    """The mean over the samples of the micro-batch: the sample mean where the whole step is one micro-batch."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(list(inputs.response_lengths))
        return torch.stack([(p * m).sum() / m.sum() for p, m in zip(parts, inputs.loss_masks, strict=True)]).mean()

    return reduce
