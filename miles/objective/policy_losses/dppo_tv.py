"""DPPO with total variation: drop tokens whose probability has moved too far (arXiv 2602.04879)."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from miles.flags import Errors, flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch

    from miles.objective.settings import StepShape


@dataclass(frozen=True)
class DppoTvFlags:
    """dppo_tv: how far a probability may move."""

    dppo_tv_delta: float = flag(0.15, "|p - p_old| of a token above which --policy-loss dppo_tv drops it")


class Dppo(PolicyLoss):
    """``-M rho A``; the mask M is 0 if the token pushes further outside the trust region (2602.04879).

    M = 0 if D > delta and either A > 0 and rho > 1, or A < 0 and rho < 1. D is a divergence of the two policies on two
    outcomes, the sampled token or any other, so no vocabulary is stored. PPO's clip bounds the ratio instead, which is
    large for rare tokens that hardly move. The paper measures from the policy that sampled; here that is p_old, the
    trainer's own log-probs (``--use-tis`` corrects for the engine's). verl also bounds the ratio, at ``clip_ratio_c``,
    20 by default, and its script for the paper lifts that to 10000; here nothing bounds it. A sample of advantage 0 has
    no gradient.
    """

    delta: str
    divergence: str

    def check(self, flags: Any, shape: "StepShape", errors: Errors) -> None:
        """Check the bound."""
        errors.above(flags, 0, self.delta)

    def formula(self, flags: Any) -> list[Term]:
        """Return the loss of a token before its weight, and what is in it."""
        module = type(self).__module__
        return [
            Term("-ρ A, 0 where D > δ and ρ is already on the side to which A pushes", module),
            Term(f"ρ = exp(log p - log p_old), D = {self.divergence}, δ = {getattr(flags, self.delta):g}", module),
        ]

    def idle_on_policy(self, flags: Any) -> list[str]:
        """Name the bound."""
        return [f"--{self.delta.replace('_', '-')}: one step per iteration, so no token has moved"]

    @abstractmethod
    def divergences(self, log_probs: "torch.Tensor", old_log_probs: "torch.Tensor") -> "torch.Tensor":
        """Return D of every token; all [R], without a graph."""

    def token_losses(self, flags: Any, tokens: PolicyTokens) -> TokenLosses:
        """Drop the tokens outside the trust region; they count as clipped."""
        log_probs, micro = tokens.log_probs.detach(), tokens.micro
        old = log_probs if micro.old_log_probs is None else micro.old_log_probs.masked_fill(micro.loss_mask == 0, 0.0)
        far = self.divergences(log_probs, old) > getattr(flags, self.delta)
        dropped = far & (tokens.advantages * tokens.log_ratio.detach() > 0)
        losses = (-tokens.advantages * tokens.log_ratio.exp()).masked_fill(dropped, 0.0)
        return TokenLosses(losses, dropped.float())


class DppoTv(Dppo):
    """``D = |p - p_old|``, the total variation of the two outcomes (2602.04879, Binary-TV)."""

    name = "dppo_tv"
    summary = "the ratio of each token, dropped if the probability moved by more than a bound (DPPO)"
    reads = ("dppo_tv_delta",)
    own_flags = DppoTvFlags
    delta = "dppo_tv_delta"
    divergence = "|p - p_old|"

    def divergences(self, log_probs: "torch.Tensor", old_log_probs: "torch.Tensor") -> "torch.Tensor":
        """Return the absolute difference of the probabilities."""
        return (log_probs.exp() - old_log_probs.exp()).abs()


POLICY_LOSS = DppoTv()
