"""DPPO with total variation: drop tokens whose probability has moved too far (arXiv 2602.04879)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DppoFlags:
    """dppo_tv and dppo_kl: how large a ratio may be."""

    dppo_ratio_max: float = flag(
        0.0,
        "upper bound of the ratio in dppo_tv and dppo_kl, as in verl (20); absolute; 0 is none, the paper's formula",
        at_least=0,
    )


@dataclass(frozen=True)
class DppoTvFlags(DppoFlags):
    """dppo_tv: how far a probability may move."""

    dppo_tv_delta: float = flag(0.15, "|p - p_old| of a token above which --policy-loss dppo_tv drops it", above=0)


D = TypeVar("D", bound=DppoFlags)


class Dppo(PolicyLoss[D]):
    """``-M rho A``; the mask M is 0 if the token pushes further outside the trust region (2602.04879).

    M = 0 if D > delta and either A > 0 and rho > 1, or A < 0 and rho < 1. D is a divergence of the two policies on two
    outcomes, the sampled token or any other, so no vocabulary is stored. PPO's clip bounds the ratio instead, which is
    large for rare tokens that hardly move. The paper measures from the policy that sampled; here that is p_old, the
    trainer's own log-probs (``--use-tis`` corrects for the engine's). A sample of advantage 0 has no gradient.

    verl's code also bounds the ratio: ``-M sg(min(rho, C)) A log p``, with C = ``clip_ratio_c``, 20 by default; its
    script for the paper lifts that to 10000. That is ``--dppo-ratio-max C``; sg stops the gradient. Below C both have
    the same gradient; above it a token keeps one, with the weight C. The default, 0, is the paper's formula.
    """

    delta: str
    divergence: str

    def formula(self, flags: D) -> list[Term]:
        """Return the loss of a token before its weight, and the definitions of its symbols."""
        module = type(self).__module__
        bound = flags.dppo_ratio_max
        weighted = f"-sg(min(ρ, {bound:g})) A log p" if bound else "-ρ A"
        return [
            Term(f"{weighted}, 0 where D > δ and ρ is already on the side to which A pushes", module),
            Term(f"ρ = exp(log p - log p_old), D = {self.divergence}, δ = {getattr(flags, self.delta):g}", module),
        ]

    def idle_on_policy(self, flags: D) -> list[str]:
        """Name the bounds that a ratio of 1 does not reach."""
        notes = [f"--{self.delta.replace('_', '-')}: one step per iteration, so no token has moved"]
        if flags.dppo_ratio_max >= 1:
            notes.append("--dppo-ratio-max: one step per iteration, so every ratio is 1")
        return notes

    @abstractmethod
    def divergences(self, log_probs: "torch.Tensor", old_log_probs: "torch.Tensor") -> "torch.Tensor":
        """Return D of every token; all [R], without a graph."""

    def token_losses(self, flags: D, tokens: PolicyTokens) -> TokenLosses:
        """Drop the tokens outside the trust region; they count as clipped, and so do those above the bound."""
        log_probs, micro = tokens.log_probs.detach(), tokens.micro
        old = log_probs if micro.old_log_probs is None else micro.old_log_probs.masked_fill(micro.loss_mask == 0, 0.0)
        far = self.divergences(log_probs, old) > getattr(flags, self.delta)
        dropped = far & (tokens.advantages * tokens.log_ratio.detach() > 0)
        clipped = dropped
        if bound := flags.dppo_ratio_max:
            ratio = tokens.log_ratio.detach().exp()
            losses = -ratio.clamp(max=bound) * tokens.advantages * tokens.log_probs
            clipped = dropped | (ratio > bound)
        else:
            losses = -tokens.advantages * tokens.log_ratio.exp()
        return TokenLosses(losses.masked_fill(dropped, 0.0), clipped.float())


class DppoTv(Dppo[DppoTvFlags]):
    """``D = |p - p_old|``, the total variation of the two outcomes (2602.04879, Binary-TV)."""

    name = "dppo_tv"
    summary = "the ratio of each token, dropped if the probability moved by more than a bound (DPPO)"
    own_flags = DppoTvFlags
    delta = "dppo_tv_delta"
    divergence = "|p - p_old|"

    def divergences(self, log_probs: "torch.Tensor", old_log_probs: "torch.Tensor") -> "torch.Tensor":
        """Return the absolute difference of the probabilities."""
        return (log_probs.exp() - old_log_probs.exp()).abs()
