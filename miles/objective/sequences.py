"""Compute sums and means over whole sequences, also of sequences that context parallelism has cut."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from miles.types.train_batch import MicroBatch

_COLUMNS = (
    *("loss_mask", "advantages", "rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "returns"),
    *("selected", "top_entropy"),
)


def whole_responses(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Gather the flat [R] values of this rank and of those that share its samples, [sum of response_lengths].

    The gradient flows back to this rank's own values only; the values of other ranks have their graph on their ranks.
    """
    whole = values.new_zeros(sum(micro.response_lengths))
    local = whole.index_put((micro.response_index,), values)
    return local + (micro.context.sum(local) - local.detach()) if micro.context.size > 1 else local


def gather_whole(micro: MicroBatch) -> MicroBatch:
    """Return the micro-batch with whole responses, as a rank on its own would have it; collective in its context group.

    The token axis, which the model reads, stays this rank's. Masked tokens hold 0 in the gathered columns.
    """
    from miles.types.groups import ALONE

    masked = micro.loss_mask == 0
    gathered: dict[str, Any] = {}
    for name in _COLUMNS:
        column = getattr(micro, name)
        if column is not None:
            gathered[name] = whole_responses(column.masked_fill(masked, 0.0), micro)
    lengths = micro.sample_index.new_tensor(micro.response_lengths)
    return replace(
        micro,
        sample_index=(lengths.new_ones(lengths.shape).cumsum(0) - 1).repeat_interleave(lengths),
        response_index=lengths.new_ones(sum(micro.response_lengths)).cumsum(0) - 1,
        context=ALONE,
        **gathered,
    )


def count_once(value: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Keep ``value``, which all ranks that share the samples have, on the first; keep its gradient on all of them."""
    return value if micro.context.rank == 0 else value - value.detach()


def sequence_sums(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Sum over each sample's whole response, fp32 [S], without a graph; ``values`` are [R]."""
    sums = values.new_zeros(len(micro.response_lengths)).float()
    return micro.context.sum(sums.index_add(0, micro.sample_index, values.detach().float()))


def sequence_means(values: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
    """Average over the loss tokens of each sample's whole response, fp32 [S]; 0 where all are masked."""
    counted = sequence_sums(micro.loss_mask, micro)
    return sequence_sums(values.masked_fill(micro.loss_mask == 0, 0.0), micro) / counted.clamp(min=1.0)
