"""PPO's clipped ratio (arXiv 1707.06347), with clip-higher (2503.14476) and dual clip (1912.09729)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Optional, TypeVar

from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ClipFlags:
    """ppo and gspo: the range where ratios are not clipped."""

    eps_clip: float = flag(0.2, "lower PPO ratio clip: 1 - eps", within="(0, 1]")
    eps_clip_high: Optional[float] = flag(None, "upper PPO ratio clip: 1 + eps; default --eps-clip", above=0)
    eps_clip_c: Optional[float] = flag(None, "dual-clip bound for negative advantages, above 1", above=1)


C = TypeVar("C", bound=ClipFlags)


class PpoClip(PolicyLoss[C]):
    """``max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A)`` of each token, ``rho = p / p_old`` (1707.06347, Eq. 7).

    DAPO (2503.14476) has ``eps_high`` above ``eps``. With ``--eps-clip-c C``, a negative advantage also bounds this by
    ``-C A`` from above (dual clip, 1912.09729, Eq. 5).
    """

    name = "ppo"
    summary = "the clipped ratio of each token"
    own_flags: ClassVar[type | None] = ClipFlags
    ratio = "exp(log p - log p_old)"

    def formula(self, flags: C) -> list[Term]:
        """Return the loss of a token before its weight, l'_it."""
        low, high = clip_bounds(flags)
        text = f"max(-ρ A, -clip(ρ, {low:g}, {high:g}) A), ρ = {self.ratio}"
        terms = [Term(text, type(self).__module__)]
        if flags.eps_clip_c is not None:
            terms.append(Term(f"       at most -{flags.eps_clip_c:g} A if A < 0 (dual clip)", __name__))
        return terms

    def idle_on_policy(self, flags: C) -> list[str]:
        """Name the clip range and the dual clip."""
        low, high = clip_bounds(flags)
        notes = [f"clip range [{low:g}, {high:g}]: one step per iteration, so the ratio is 1 and nothing is clipped"]
        return notes if flags.eps_clip_c is None else [*notes, "--eps-clip-c: the same"]

    def token_losses(self, flags: C, tokens: PolicyTokens) -> TokenLosses:
        """Clip each token's own ratio."""
        return clipped_losses(tokens.log_ratio, tokens.advantages, flags)


def clip_bounds(flags: ClipFlags) -> tuple[float, float]:
    """Return the ratios between which the loss is not clipped."""
    high = flags.eps_clip if flags.eps_clip_high is None else flags.eps_clip_high
    return 1.0 - flags.eps_clip, 1.0 + high


def clipped_losses(log_ratio: "torch.Tensor", advantages: "torch.Tensor", flags: ClipFlags) -> TokenLosses:
    """Compute ``max(-ratio A, -clip(ratio) A)`` per token; all [R], fp32.

    ``log_ratio`` is log policy - log old policy. With ``eps_clip_c`` (above 1) the loss of a negative advantage is at
    most ``-eps_clip_c * advantage``: dual clip (1912.09729 Eq. 5). The clip fraction counts PPO's clip alone.
    """
    low, high = clip_bounds(flags)
    ratio = log_ratio.float().exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(low, high)
    losses = unclipped.maximum(clipped)
    if flags.eps_clip_c is not None:
        assert flags.eps_clip_c > 1.0, f"--eps-clip-c {flags.eps_clip_c} must be above 1"
        losses = losses.minimum(-flags.eps_clip_c * advantages).where(advantages < 0, losses)
    return TokenLosses(losses, (clipped > unclipped).float().detach())
