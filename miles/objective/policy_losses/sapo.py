"""SAPO: a sigmoid gate on each token's ratio instead of a clip (soft adaptive policy optimization, 2511.20347)."""

from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term


@dataclass(frozen=True)
class SapoFlags:
    """sapo: the temperatures of the gate."""

    sapo_tau_pos: float = flag(1.0, "temperature of --policy-loss sapo for positive advantages", above=0)
    sapo_tau_neg: float = flag(
        1.05, "temperature of --policy-loss sapo for other advantages; higher drops sooner", above=0
    )


class Sapo(PolicyLoss[SapoFlags]):
    """``-(4 / tau) sigmoid(tau (rho - 1)) A``, with a tau for positive advantages and one for the others (2511.20347).

    The gradient is ``-w rho A grad log p`` with ``w = 4 s (1 - s)``, s the sigmoid: 1 at a ratio of 1, and smaller the
    farther away. A token of advantage 0 has no gradient.
    """

    name = "sapo"
    summary = "a sigmoid gate on the ratio of each token, instead of a clip"
    own_flags = SapoFlags

    def formula(self, flags: SapoFlags) -> list[Term]:
        """Return the loss of a token before its weight, and the definitions of its symbols."""
        return [
            Term("-(4 / τ) sigmoid(τ (ρ - 1)) A", __name__),
            Term(
                f"ρ = exp(log p - log p_old), τ = {flags.sapo_tau_pos:g} if A > 0, else {flags.sapo_tau_neg:g}",
                __name__,
            ),
        ]

    def idle_on_policy(self, flags: SapoFlags) -> list[str]:
        """Name the temperatures: at a ratio of 1 the gate's slope is 1 at any of them."""
        return ["--sapo-tau-pos, --sapo-tau-neg: one step per iteration, so every ratio and every slope is 1"]

    def token_losses(self, flags: SapoFlags, tokens: PolicyTokens) -> TokenLosses:
        """Gate each token's ratio. Nothing is clipped."""
        ratio = tokens.log_ratio.exp()
        tau = ratio.new_full(ratio.shape, flags.sapo_tau_neg).masked_fill(tokens.advantages > 0, flags.sapo_tau_pos)
        return TokenLosses(-(4.0 / tau) * (tau * (ratio - 1.0)).sigmoid() * tokens.advantages, None)
