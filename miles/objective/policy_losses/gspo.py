"""GSPO: PPO's clip on the ratio of whole sequences (arXiv 2507.18071)."""

from miles.objective.policy_losses.base import PolicyTokens, TokenLosses
from miles.objective.policy_losses.ppo_clip import ClipFlags, PpoClip, clipped_losses
from miles.objective.sequences import sequence_means


class Gspo(PpoClip[ClipFlags]):
    """``max(-s A, -clip(s, 1 - eps, 1 + eps_high) A)``, with ``s = (p(y) / p_old(y))^(1 / |y|)`` of each sequence y.

    So s is the geometric mean of the ratios of its tokens (2507.18071, Eq. 5 and 7).
    """

    name = "gspo"
    summary = "the clipped ratio of whole sequences"
    ratio = "exp(log p - log p_old) in its geometric mean over the sequence"

    def idle_on_policy(self, flags: ClipFlags) -> list[str]:
        """Add that the sequence's ratio equals the ratio of its tokens."""
        reason = "one step per iteration, so every ratio is 1, as under ppo"
        return [*super().idle_on_policy(flags), f"--policy-loss gspo: {reason}"]

    def token_losses(self, flags: ClipFlags, tokens: PolicyTokens) -> TokenLosses:
        """Clip the ratio of the sequence (Eq. 7), written as in Eq. 13.

        The value is the sequence's and the gradient the token's own. That adds up to the same if the tokens of a
        sequence weigh alike, and needs no gradient from other ranks.
        """
        log_ratio, micro = tokens.log_ratio, tokens.micro
        of_sequence = sequence_means(log_ratio, micro)[micro.sample_index] + (log_ratio - log_ratio.detach())
        return clipped_losses(of_sequence, tokens.advantages, flags)
