"""Clip-Cov: PPO's clip, and no gradient for a few tokens of large covariance, drawn at random (arXiv 2505.22617)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles.base.flags import Errors, flag
from miles.objective.policy_losses.base import PolicyTokens, StepTokens, TokenLosses
from miles.objective.policy_losses.kl_cov import SelectsByCovariance, covariances
from miles.objective.policy_losses.ppo_clip import ClipFlags, PpoClip, clip_bounds
from miles.objective.registry import Needs, Term

if TYPE_CHECKING:
    import numpy as np

    from miles.objective.registry import StepShape


@dataclass(frozen=True)
class ClipCovFlags(ClipFlags):
    """clip_cov: how many tokens lose their gradient, and the range of their covariance."""

    clip_cov_fraction: float = flag(
        2e-4, "fraction of the step's loss tokens that --policy-loss clip_cov takes the gradient from", within="[0, 1]"
    )
    clip_cov_min: float = flag(1.0, "covariance above which --policy-loss clip_cov may draw a token")
    clip_cov_max: float = flag(5.0, "covariance below which --policy-loss clip_cov may draw a token")


class ClipCov(PpoClip[ClipCovFlags], SelectsByCovariance[ClipCovFlags]):
    """PPO's clipped surrogate, 0 for r T random tokens with a covariance in (min, max) (2505.22617, Clip-Cov).

    The covariance of a token is ``(log p - mean log p) (A - mean A)``, the means over the step. The paper's equation
    has the ratio without PPO's clip: ``--eps-clip 1 --eps-clip-high 1e9``. The authors' code, and this, clip as PPO
    does and do not draw tokens that PPO's clip takes the gradient from. At least one token is drawn, if there is any,
    from the whole step; verl draws in each micro-batch. The draw depends on the step's trajectories alone, so no layout
    changes it. The policy is scored once more in every step. A sample of advantage 0 has no gradient.
    """

    name = "clip_cov"
    summary = "the clipped ratio, without a few random tokens of large covariance of log-prob and advantage"
    own_flags = ClipCovFlags

    def needs(self, flags: ClipCovFlags) -> Needs:
        """Also ask for the log-probs of the first step of an iteration: it draws tokens too."""
        return super().needs(flags) | Needs(old_log_probs=True)

    def check(self, flags: ClipCovFlags, shape: "StepShape", errors: Errors) -> None:
        """Check the order of the bounds."""
        if errors.none_about("clip_cov_min", "clip_cov_max") and flags.clip_cov_min >= flags.clip_cov_max:
            rule = f"leaves no covariance below --clip-cov-max {flags.clip_cov_max:g}"
            errors.refuse("clip_cov_min", flags.clip_cov_min, rule, "give a lower bound that is below the upper")

    def formula(self, flags: ClipCovFlags) -> list[Term]:
        """Return PPO's, and which tokens it is 0 for."""
        text = (
            f"0 for {flags.clip_cov_fraction:g} T tokens of the step, at least one, drawn from those with "
            f"{flags.clip_cov_min:g} < c < {flags.clip_cov_max:g}, c = (log p - its mean) (A - its mean)"
        )
        return [*super().formula(flags), Term(text, __name__)]

    def select_tokens(self, flags: ClipCovFlags, tokens: StepTokens) -> "np.ndarray":
        """Draw from the tokens within the bounds that PPO does not clip."""
        import numpy as np

        low, high = clip_bounds(flags)
        covs = covariances(tokens)
        ratio = np.exp(tokens.log_probs - tokens.old_log_probs)
        clipped = ((tokens.advantages > 0) & (ratio > high)) | ((tokens.advantages < 0) & (ratio < low))
        eligible = (covs > flags.clip_cov_min) & (covs < flags.clip_cov_max) & ~clipped
        number = max(1, int(flags.clip_cov_fraction * len(covs)))
        # All tokens are put in an order, so that one that rounding moves over a bound does not change the whole draw.
        order = np.random.default_rng(tokens.seed).permutation(len(covs))
        chosen = np.zeros(len(covs), bool)
        chosen[order[eligible[order]][:number]] = True
        return chosen

    def token_losses(self, flags: ClipCovFlags, tokens: PolicyTokens) -> TokenLosses:
        """Take the drawn tokens out of PPO's loss; they count as clipped."""
        losses, clipped = super().token_losses(flags, tokens)
        drawn = tokens.micro.selected
        if drawn is None:
            return TokenLosses(losses, clipped)
        assert clipped is not None
        return TokenLosses(losses.masked_fill(drawn != 0, 0.0), clipped.maximum(drawn))
