"""DPPO with KL: drop tokens whose probability has moved too far, by a binary KL (arXiv 2602.04879)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.base.flags import flag
from miles.objective.policy_losses.dppo_tv import Dppo, DppoFlags

if TYPE_CHECKING:
    import torch

_SMALLEST = 1e-8  # of 1 - p: a token of probability 1 has no other outcome


@dataclass(frozen=True)
class DppoKlFlags(DppoFlags):
    """dppo_kl: how far a probability may move."""

    dppo_kl_delta: float = flag(
        0.05, "binary KL(p_old, p) of a token above which --policy-loss dppo_kl drops it", above=0
    )


class DppoKl(Dppo[DppoKlFlags]):
    """``D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))`` (2602.04879, Binary-KL)."""

    name = "dppo_kl"
    summary = "as dppo_tv, by the KL of the token against all others"
    own_flags = DppoKlFlags
    delta = "dppo_kl_delta"
    divergence = "p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))"

    def divergences(self, log_probs: "torch.Tensor", old_log_probs: "torch.Tensor") -> "torch.Tensor":
        """Return the KL of the two outcomes."""
        rest, old_rest = ((-p.expm1()).clamp(min=_SMALLEST) for p in (log_probs, old_log_probs))
        return old_log_probs.exp() * (old_log_probs - log_probs) + old_rest * (old_rest / rest).log()
