"""What a loss function returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossOutput:
    """The part of the step's loss and metrics that one micro-batch contributes.

    Both are already weighted by the step's own counts: the plain sum over all micro-batches and ranks is the step's
    value (docs/loss-aggregation.md, "gradients are sums"). ``metrics`` are detached fp32 scalars, and their names
    depend on the settings only, so that every rank reports the same ones.
    """

    loss: torch.Tensor  # fp32 scalar with a graph, also when the micro-batch is empty
    metrics: dict[str, torch.Tensor]
