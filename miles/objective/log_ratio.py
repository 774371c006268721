"""The difference of two log-prob vectors, in a form that is safe to exponentiate."""

from __future__ import annotations

import torch

# exp(88.8) overflows fp32. Bounded below that, no ratio is infinite, so none meets a zero advantage or gradient as NaN.
_BOUND = 80.0


def masked_log_ratio(log_probs: torch.Tensor, reference: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """``log_probs - reference`` in fp32, [R], within +-80; 0 without gradient where ``loss_mask`` is 0.

    What is masked may be anything, NaN and infinities included; what is not masked must be a number.
    """
    difference = log_probs.float() - reference.float()
    return difference.masked_fill(loss_mask == 0, 0.0).clamp(-_BOUND, _BOUND)
