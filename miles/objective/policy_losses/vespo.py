"""VESPO: the policy gradient, weighted by a smooth kernel of the sequence's ratio (arXiv 2602.10693)."""

from dataclasses import dataclass
from typing import Any

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term
from miles.objective.sequences import sequence_sums


@dataclass(frozen=True)
class VespoFlags:
    """vespo: the kernel for positive advantages, and for negative ones."""

    vespo_power_pos: float = flag(2.0, "c1 of --policy-loss vespo for advantages of 0 and above", above=0)
    vespo_decay_pos: float = flag(3.0, "c2 of --policy-loss vespo for advantages of 0 and above", above=0)
    vespo_power_neg: float = flag(3.0, "c1 of --policy-loss vespo for negative advantages", above=0)
    vespo_decay_neg: float = flag(2.0, "c2 of --policy-loss vespo for negative advantages", above=0)


class Vespo(PolicyLoss[VespoFlags]):
    """``-sg(phi(W)) A log p`` with ``phi(W) = W^c1 exp(c2 (1 - W))`` (2602.10693, Algorithm in appendix I).

    W is the product of the ratios of a sequence's loss tokens, not their geometric mean; phi(1) = 1, and phi falls to 0
    on both sides of W = c1 / c2. The kernel has no gradient. Defaults are the paper's: (2, 3) and (3, 2). A sample of
    advantage 0 has no gradient.
    """

    name = "vespo"
    summary = "the policy gradient, weighted by a smooth kernel of the sequence's ratio"
    own_flags = VespoFlags

    def formula(self, flags: VespoFlags) -> list[Term]:
        """Return the loss of a token before its weight, and the kernel in it."""
        return [
            Term("-sg(φ) A log p, φ = W^c1 exp(c2 (1 - W)), sg() has no gradient", __name__),
            Term("W = exp(Σ over the sequence of log p - log p_old)", __name__),
            Term(
                f"(c1, c2) = ({flags.vespo_power_neg:g}, {flags.vespo_decay_neg:g}) if A < 0, "
                f"else ({flags.vespo_power_pos:g}, {flags.vespo_decay_pos:g})",
                __name__,
            ),
        ]

    def idle_on_policy(self, flags: VespoFlags) -> list[str]:
        """Name the kernel: it is 1 at a ratio of 1."""
        return ["--policy-loss vespo: one step per iteration, so every ratio is 1, and the kernel too"]

    def token_losses(self, flags: VespoFlags, tokens: PolicyTokens) -> TokenLosses:
        """Weight each token's log-prob by the kernel of its sequence. Nothing is clipped."""
        log_w = sequence_sums(tokens.log_ratio, tokens.micro)[tokens.micro.sample_index]
        log_w = log_w.clamp(max=80.0)  # exp(88.8) overflows fp32; the kernel is 0 long before

        def kernel(power: float, decay: float) -> Any:
            return (power * log_w + decay * (1.0 - log_w.exp())).exp()

        positive = kernel(flags.vespo_power_pos, flags.vespo_decay_pos)
        negative = kernel(flags.vespo_power_neg, flags.vespo_decay_neg)
        weights = negative.where(tokens.advantages < 0, positive)
        return TokenLosses(-weights * tokens.advantages * tokens.log_probs, None)
