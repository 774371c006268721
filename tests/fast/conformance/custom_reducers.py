"""The sample mean as a user would write it for --custom-pg-loss-reducer-function-path, in both forms."""

from __future__ import annotations

import torch

from miles.objective.hooks import ReducerInputs


def typed(inputs: ReducerInputs):
    """Take one argument. In the cases that use it, every trajectory has one sample."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(list(inputs.response_lengths))
        means = [(p * m).sum() / m.sum().clamp(min=1) for p, m in zip(parts, inputs.loss_masks, strict=True)]
        return torch.stack(means).sum() / inputs.num_trajectories

    return reduce


def positional(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """Take four arguments and return the sum of sample means, which the launcher divides."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(response_lengths)
        return torch.stack([(p * m).sum() / m.sum().clamp(min=1) for p, m in zip(parts, loss_masks, strict=True)]).sum()

    return reduce


def mean_of_samples_seen(inputs: ReducerInputs):
    """Average over the samples of the micro-batch. This is the sample mean only if the step is one micro-batch."""

    def reduce(losses: torch.Tensor) -> torch.Tensor:
        parts = losses.split(list(inputs.response_lengths))
        return torch.stack([(p * m).sum() / m.sum() for p, m in zip(parts, inputs.loss_masks, strict=True)]).mean()

    return reduce
