"""Apply rotary positions with three operations, in the embedded engine and in the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, direction: int = 1) -> torch.Tensor:
    """Return x [B, T, heads, D] rotated; cos [1 or B, T, 1, D], and the first half of sin's last axis.

    With ``direction`` -1 it is rotated back, which is the derivative.
    """
    first, second = x.chunk(2, -1)
    out = x * cos
    low, high = out.chunk(2, -1)
    low.addcmul_(second, sin, value=-direction)
    high.addcmul_(first, sin, value=direction)
    return out
