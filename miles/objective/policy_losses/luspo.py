"""LUSPO: GSPO's loss times the length of the sequence (length-unbiased sequence policy optimization, 2602.05261)."""

from dataclasses import replace

from miles.objective.policy_losses.base import PolicyTokens, TokenLosses
from miles.objective.policy_losses.gspo import Gspo
from miles.objective.policy_losses.ppo_clip import ClipFlags, PpoClip
from miles.objective.registry import Term
from miles.objective.sequences import sequence_sums


class Luspo(Gspo):
    """``|y_i| max(-s_i A, -clip(s_i) A)``, with GSPO's ratio s_i and |y_i| the loss tokens of the sequence.

    Under ``sample_mean`` the length cancels GSPO's ``1 / |y_i|``, so every token has the same weight, whatever the
    length of its sequence; other aggregations would count the length twice. A sample of advantage 0 has no gradient.
    """

    name = "luspo"
    summary = "gspo times the length of the sequence"

    def formula(self, flags: ClipFlags) -> list[Term]:
        """Return GSPO's formula, times the length."""
        first, *rest = super().formula(flags)
        surrogate, ratio = first.text.rsplit(", ", maxsplit=1)
        length = f"{ratio}, |y_i| = its loss tokens"
        return [replace(first, text=f"|y_i| {surrogate}"), replace(first, text=length), *rest]

    def idle_on_policy(self, flags: ClipFlags) -> list[str]:
        """Name the clip range; the length counts at any ratio."""
        return PpoClip.idle_on_policy(self, flags)

    def token_losses(self, flags: ClipFlags, tokens: PolicyTokens) -> TokenLosses:
        """Multiply the losses of GSPO by the length."""
        losses, clipped = super().token_losses(flags, tokens)
        lengths = sequence_sums(tokens.micro.loss_mask, tokens.micro)
        return TokenLosses(losses * lengths[tokens.micro.sample_index], clipped)
