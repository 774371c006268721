"""DRO: the policy gradient with a quadratic penalty on the log ratio (arXiv 2405.19107, 2501.12599)."""

from dataclasses import dataclass
from typing import Literal

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term
from miles.objective.sequences import sequence_sums


@dataclass(frozen=True)
class DroFlags:
    """dro: the penalty."""

    dro_beta: float = flag(0.05, "weight of the quadratic penalty of --policy-loss dro", above=0)
    dro_level: Literal["sequence", "token"] = flag(
        "sequence", "log ratio in the penalty of --policy-loss dro: of the sequence, as in the papers, or of each token"
    )


class Dro(PolicyLoss[DroFlags]):
    """``-A log p + (beta / 2) d^2``, where d is the log ratio to the policy of the iteration's start, p_old.

    With d of the whole sequence it has the gradient of the papers: 2405.19107 (its baseline is a critic's value, its
    reference is fixed), and 2501.12599, whose reference is the policy of the iteration. Tinker's loss ``dro`` takes
    the d of each token. With ``--dro-level sequence`` a token's value is its part of the sequence's penalty, and
    its gradient ``beta d grad log p``.

    A sample of advantage 0 has the gradient of the penalty, so all samples are trained on.
    """

    name = "dro"
    summary = "the policy gradient with a quadratic penalty on the log ratio"
    own_flags = DroFlags

    def formula(self, flags: DroFlags) -> list[Term]:
        """Return the loss of a token before its weight, and the definitions of its symbols."""
        half = flags.dro_beta / 2
        if flags.dro_level == "token":
            return [Term(f"-A log p + {half:g} (log p - log p_old)²", __name__)]
        return [Term(f"-A log p, and {half:g} (Σ over the sequence of log p - log p_old)² for each sequence", __name__)]

    def idle_on_policy(self, flags: DroFlags) -> list[str]:
        """Name the penalty."""
        return ["--dro-beta, --dro-level: one step per iteration, so every log ratio is 0, and the penalty too"]

    def zero_advantage_has_gradient(self, flags: DroFlags) -> bool:
        """Return true: the penalty does not read the advantage."""
        return True

    def token_losses(self, flags: DroFlags, tokens: PolicyTokens) -> TokenLosses:
        """Add the penalty to the policy gradient. Nothing is clipped."""
        log_ratio, micro = tokens.log_ratio, tokens.micro
        if flags.dro_level == "token":
            penalty = 0.5 * log_ratio.square()
        else:
            assert flags.dro_level == "sequence"
            # Summed over the sequence: value d (d - d / 2), gradient d times the gradient of each log ratio.
            penalty = sequence_sums(log_ratio, micro)[micro.sample_index] * (log_ratio - 0.5 * log_ratio.detach())
        return TokenLosses(-tokens.advantages * tokens.log_probs + flags.dro_beta * penalty, None)
