"""The head of the embedded engine's model in fp32, under a body in bf16 (--fp32-lm-head)."""

from __future__ import annotations

import torch

from miles.objective.token_log_probs import head_logits


class Fp32Head:
    """Replaces a head's product by the trainer's (``head_logits``), of the same weights.

    On a CPU the fp32 copy of the weights is kept from one decoding step to the next, because copying takes as long as
    multiplying.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        """Replace ``head.forward``."""
        self._head = head
        self._copy: torch.Tensor | None = None
        head.forward = self._logits  # type: ignore[assignment, method-assign]

    def forget(self) -> None:
        """Drop the copy: the weights change."""
        self._copy = None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states [..., H], fp32 [..., V]."""
        weight, bias, rows = self._head.weight, self._head.bias, hidden.flatten(0, -2)
        if hidden.is_cuda:
            logits = head_logits(rows, weight, bias, fp32=True)
        else:
            if self._copy is None:
                self._copy = weight.float()
            logits = head_logits(rows.float(), self._copy, None if bias is None else bias.float())
        return logits.view(*hidden.shape[:-1], -1)
