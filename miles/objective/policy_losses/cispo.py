"""CISPO: the policy gradient weighted by a ratio that is bounded above and has no gradient (arXiv 2506.13585)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.flags import Errors, flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    from miles.objective.settings import StepShape


@dataclass(frozen=True)
class CispoFlags:
    """cispo: the bound of the ratio."""

    # TRL recommends 5, after ScaleRL (arXiv 2510.13786): the help of GRPOConfig.epsilon_high.
    ratio_max: float = flag(5.0, "upper bound of the ratio in --policy-loss cispo; absolute, not 1 + eps")


class Cispo(PolicyLoss):
    """``-sg(min(ratio, ratio_max)) A log p``: a clipped token keeps its gradient, with a bounded weight.

    2506.13585 Eq. 4, without a lower bound, as its authors use it; ``sg`` stops the gradient.
    """

    name = "cispo"
    summary = "the policy gradient, weighted by a bounded ratio without a gradient"
    reads = ("ratio_max",)
    own_flags = CispoFlags

    def check(self, flags: Any, shape: "StepShape", errors: Errors) -> None:
        """Check the bound."""
        errors.above(flags, 0, "ratio_max")

    def formula(self, flags: Any) -> list[Term]:
        """Return the loss of a token before its weight, and the ratio in it."""
        return [
            Term(f"-sg(min(ρ, {flags.ratio_max:g})) A log p", __name__),
            Term("ρ = exp(log p - log p_old), sg() has no gradient", __name__),
        ]

    def idle_on_policy(self, flags: Any) -> list[str]:
        """Name the bound."""
        return ["--ratio-max: one step per iteration, so every ratio is 1"] if flags.ratio_max >= 1 else []

    def token_losses(self, flags: Any, tokens: PolicyTokens) -> TokenLosses:
        """Weight each token's log-prob; a ratio above the bound counts as clipped."""
        ratio = tokens.log_ratio.detach().exp()
        losses = -ratio.clamp(max=flags.ratio_max) * tokens.advantages * tokens.log_probs
        return TokenLosses(losses, (ratio > flags.ratio_max).float())


POLICY_LOSS = Cispo()
