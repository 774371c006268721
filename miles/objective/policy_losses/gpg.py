"""GPG's policy loss: the policy gradient, without a ratio (group policy gradient, arXiv 2504.02546)."""

from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term


class GpgLoss(PolicyLoss[None]):
    """``-A log p`` (2504.02546, Eq. 5): no surrogate, no clip, no ratio to the policy that sampled.

    Later steps of an iteration are off-policy, and nothing corrects that. A token of advantage 0 has no gradient.
    """

    name = "gpg"
    summary = "the policy gradient, without a ratio"
    reads_ratio = False

    def formula(self, flags: None) -> list[Term]:
        """Return the loss of a token before its weight."""
        return [Term("-A log p", __name__)]

    def token_losses(self, flags: None, tokens: PolicyTokens) -> TokenLosses:
        """Weight each token's log-prob by its advantage."""
        return TokenLosses(-tokens.advantages * tokens.log_probs, None)
