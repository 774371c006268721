"""GMPO: the geometric mean of a sequence's ratios, each clipped on its own (arXiv 2507.20673)."""

from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term
from miles.objective.sequences import sequence_means


@dataclass(frozen=True)
class GeoMeanFlags:
    """geo_mean: the range of a token's ratio."""

    geo_mean_log_clip: float = flag(
        0.4, "bound of |log ratio| of each token in --policy-loss geo_mean, one-sided", above=0
    )


class GeoMean(PolicyLoss[GeoMeanFlags]):
    """``-A prod_t c(rho_t)^(1/M)`` over the M loss tokens of a sequence (GMPO, 2507.20673, Eq. 4).

    ``c`` clips as PPO does, on the side to which the advantage pushes: to at most e^eps if A > 0, to at least e^-eps
    if A < 0. The paper uses eps = 0.4. GSPO clips the mean; this clips before the mean, so one token cannot carry a
    sequence, and a clipped token alone loses its gradient. Each token has the sequence's value and its own gradient, so
    that the gradient is the paper's if the tokens of a sequence weigh alike (``sample_mean``). A sample of advantage 0
    has no gradient.
    """

    name = "geo_mean"
    summary = "the geometric mean of a sequence's clipped ratios (GMPO)"
    own_flags = GeoMeanFlags

    def formula(self, flags: GeoMeanFlags) -> list[Term]:
        """Return the loss of a token before its weight, and the definitions of its symbols."""
        eps = flags.geo_mean_log_clip
        return [
            Term("-A exp(mean of d over the sequence)", __name__),
            Term(f"d = log p - log p_old, at most {eps:g} if A > 0, at least {-eps:g} if A < 0", __name__),
        ]

    def idle_on_policy(self, flags: GeoMeanFlags) -> list[str]:
        """Name the bound."""
        return ["--geo-mean-log-clip: one step per iteration, so every ratio is 1"]

    def token_losses(self, flags: GeoMeanFlags, tokens: PolicyTokens) -> TokenLosses:
        """Clip each token's log ratio, then average over the sequence."""
        eps, log_ratio, micro = flags.geo_mean_log_clip, tokens.log_ratio, tokens.micro
        above = (tokens.advantages > 0) & (log_ratio > eps)
        below = (tokens.advantages < 0) & (log_ratio < -eps)
        clipped = log_ratio.masked_fill(above, eps).masked_fill(below, -eps)
        of_sequence = sequence_means(clipped, micro)[micro.sample_index] + (clipped - clipped.detach())
        return TokenLosses(-tokens.advantages * of_sequence.exp(), (above | below).float())
