"""From per-token values to a scalar: a weighted sum whose weights are known before the loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from miles.train_batch import MicroBatch

Reducer = Callable[[torch.Tensor], torch.Tensor]
"""Maps the flat per-token vector [R] of a micro-batch to its fp32 scalar share of the step's value."""


def get_sum_of_sample_mean(micro: MicroBatch, calculate_per_token_loss: bool) -> Reducer:
    """The default reducer: ``1/N sum_r 1/M_r sum_t m l``, or ``1/T sum_t m l`` per token.

    A rollout's mean is taken over all of its samples, wherever they stand. 1/N and 1/T are those of the whole step, so
    the sum over micro-batches and ranks is the step's value.

    >>> import torch
    >>> weights = torch.tensor([0.5, 0.0, 0.25])
    >>> float(weighted_sum(weights)(torch.tensor([1.0, float("nan"), 2.0])))
    1.0
    """
    if calculate_per_token_loss:
        return weighted_sum(micro.loss_mask.float() / max(micro.num_loss_tokens, 1))
    return per_sample_reducer(micro, micro.trajectory_token_counts)


def per_sample_reducer(micro: MicroBatch, denominators: torch.Tensor) -> Reducer:
    """``1/N sum_i S_i / denominators[i]`` with ``S_i = sum_t m_it l_it``; ``denominators`` is [S], above 0."""
    per_sample = 1.0 / (denominators.float() * micro.num_trajectories)
    return weighted_sum(per_sample.index_select(0, micro.sample_index).mul_(micro.loss_mask))


def weighted_sum(weights: torch.Tensor) -> Reducer:
    """``sum_t weights[t] values[t]`` in fp32. Values of weight 0 are not read: they and their gradient may be NaN."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        assert values.shape == weights.shape, f"{tuple(values.shape)} values for {tuple(weights.shape)} weights"
        return _WeightedSum.apply(values, weights)

    return reduce


class _WeightedSum(torch.autograd.Function):
    """One pass over the values, and one over the weights for their gradient: millions of tokens are usual."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weights)
        ctx.dtype = values.dtype
        return torch.dot(values.float().masked_fill(weights == 0, 0.0), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weights,) = ctx.saved_tensors
        return (weights * grad).to(ctx.dtype), None
