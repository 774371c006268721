"""CISPO: the policy gradient weighted by a ratio that is bounded and has no gradient (arXiv 2506.13585)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.base.flags import Errors, flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    from miles.objective.registry import StepShape


@dataclass(frozen=True)
class CispoFlags:
    """cispo: the bounds of the ratio."""

    # TRL recommends 5, after ScaleRL (arXiv 2510.13786): the help of GRPOConfig.epsilon_high.
    ratio_max: float = flag(5.0, "upper bound of the ratio in --policy-loss cispo; absolute, not 1 + eps", above=0)
    ratio_min: float = flag(
        0.0, "lower bound of the ratio in --policy-loss cispo; absolute, not 1 - eps; 0 is none", at_least=0
    )


class Cispo(PolicyLoss[CispoFlags]):
    """``-sg(clip(ratio, ratio_min, ratio_max)) A log p``: a clipped token keeps its gradient, with a bounded weight.

    2506.13585 Eq. 4 and 5, whose clip has two sides; ``sg`` stops the gradient. Its authors set no lower bound, and
    ScaleRL has none: ``ratio_min`` 0, the default. verl 0.9.1 clips below too, at ``1 - clip_ratio_low`` with a default
    of 0.2: ``--ratio-min 0.8 --ratio-max 1.2`` is its loss. A token below the bound then weighs more than its ratio.
    """

    name = "cispo"
    summary = "the policy gradient, weighted by a bounded ratio without a gradient"
    own_flags = CispoFlags

    def check(self, flags: CispoFlags, shape: "StepShape", errors: Errors) -> None:
        """Check the order of the bounds."""
        if errors.none_about("ratio_min", "ratio_max") and flags.ratio_min > flags.ratio_max:
            rule = f"is above --ratio-max {flags.ratio_max:g}"
            errors.refuse("ratio_min", flags.ratio_min, rule, "give a lower bound that is below the upper")

    def formula(self, flags: CispoFlags) -> list[Term]:
        """Return the loss of a token before its weight, and the ratio in it."""
        low, high = flags.ratio_min, flags.ratio_max
        bounded = f"clip(ρ, {low:g}, {high:g})" if low else f"min(ρ, {high:g})"
        return [
            Term(f"-sg({bounded}) A log p", __name__),
            Term("ρ = exp(log p - log p_old), sg() has no gradient", __name__),
        ]

    def idle_on_policy(self, flags: CispoFlags) -> list[str]:
        """Name the bounds that a ratio of 1 does not reach."""
        reason = "one step per iteration, so every ratio is 1"
        notes = [f"--ratio-max: {reason}"] if flags.ratio_max >= 1 else []
        return [*notes, f"--ratio-min: {reason}"] if 0 < flags.ratio_min <= 1 else notes

    def token_losses(self, flags: CispoFlags, tokens: PolicyTokens) -> TokenLosses:
        """Weight each token's log-prob; a ratio outside the bounds counts as clipped."""
        ratio = tokens.log_ratio.detach().exp()
        losses = -ratio.clamp(flags.ratio_min, flags.ratio_max) * tokens.advantages * tokens.log_probs
        return TokenLosses(losses, ((ratio > flags.ratio_max) | (ratio < flags.ratio_min)).float())
