"""Compute what an objective needs of whole sequences, also where context parallelism has cut them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from miles.train_batch import MicroBatch


def whole_responses(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Gather the flat [R] values of this rank and of those that share its samples, [sum of response_lengths].

    The gradient that comes back is that of this rank's own values; those of the others have their graph on their ranks.
    """
    whole = values.new_zeros(sum(micro.response_lengths))
    mine = whole.index_put((micro.response_index,), values)
    return mine + (micro.context.sum(mine) - mine.detach()) if micro.context.size > 1 else mine


def sequence_sums(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Sum over each sample's whole response, fp32 [S], without a graph; ``values`` are [R]."""
    sums = values.new_zeros(len(micro.response_lengths)).float()
    return micro.context.sum(sums.index_add(0, micro.sample_index, values.detach().float()))


def sequence_means(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Average over the loss tokens of each sample's whole response, fp32 [S]; 0 where all are masked."""
    counted = sequence_sums(micro.loss_mask, micro)
    return sequence_sums(values.masked_fill(micro.loss_mask == 0, 0.0), micro) / counted.clamp(min=1.0)
