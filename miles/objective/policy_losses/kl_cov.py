"""KL-Cov: a penalty on the few tokens whose probability and advantage vary together most (arXiv 2505.22617)."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles.base.choices import F
from miles.base.flags import flag
from miles.objective.policy_losses.base import PolicyLoss, PolicyTokens, StepTokens, TokenLosses
from miles.objective.registry import Term

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class KlCovFlags:
    """kl_cov: how many tokens, and how strong the penalty is."""

    kl_cov_fraction: float = flag(
        2e-4, "fraction of the step's loss tokens that --policy-loss kl_cov penalizes", within="[0, 1]"
    )
    kl_cov_coef: float = flag(1.0, "weight of the penalty of --policy-loss kl_cov", above=0)
    kl_cov_penalty: Literal["abs", "kl"] = flag(
        "abs",
        "penalty of --policy-loss kl_cov: abs, |log ratio|, as in the authors' code; kl, the KL(p_old, p) of the "
        "paper's equation, estimated from the sampled token by ratio - 1 - log ratio",
    )


class SelectsByCovariance(PolicyLoss[F]):
    """A loss that treats some tokens of a step apart, chosen by ``(log p - mean log p) (A - mean A)`` (2505.22617).

    The means are over the loss tokens of the whole step. That covariance is what lowers the entropy of the policy. The
    policy is scored once more for it before each step but the first of an iteration: there the scores of the
    iteration's start are the current ones.
    """

    selects_tokens = True


class KlCov(SelectsByCovariance[KlCovFlags]):
    """``-rho A``, plus ``coef d`` for the k T tokens of the largest covariance (2505.22617, KL-Cov).

    The paper's Eq. 14 has ``d = KL(p_old, p)`` over the vocabulary. No trainer keeps p_old for every word, so
    ``--kl-cov-penalty kl`` estimates it from the sampled token: ``d = rho - 1 - log rho``, whose mean over tokens drawn
    from p_old is this KL, and whose gradient has the KL's as its mean. The authors' code has ``d = |log rho|``, the
    default: its gradient does not shrink as rho goes to 1, so it holds the chosen tokens more firmly.

    Nothing is clipped. At least one token is chosen, from the whole step; verl chooses in each
    micro-batch. In the first step of an iteration every log ratio is 0, and nothing is chosen. In later ones the policy
    is scored once more. A sample of advantage 0 can be chosen, and then has a gradient.
    """

    name = "kl_cov"
    summary = "the ratio, with a penalty on the few tokens of the largest covariance of log-prob and advantage"
    own_flags = KlCovFlags

    def formula(self, flags: KlCovFlags) -> list[Term]:
        """Return the loss of a token before its weight, and which tokens are penalized."""
        penalty = "|log ρ|" if flags.kl_cov_penalty == "abs" else "(ρ - 1 - log ρ)"
        return [
            Term(f"-ρ A + {flags.kl_cov_coef:g} {penalty} [t in K], ρ = exp(log p - log p_old)", __name__),
            Term(
                f"K = the {flags.kl_cov_fraction:g} T tokens of the step with the largest c, at least one, "
                "c = (log p - its mean) (A - its mean)",
                __name__,
            ),
        ]

    def idle_on_policy(self, flags: KlCovFlags) -> list[str]:
        """Name the penalty."""
        return ["--policy-loss kl_cov: one step per iteration, so every log ratio is 0, and the penalty too"]

    def zero_advantage_has_gradient(self, flags: KlCovFlags) -> bool:
        """Return true: the penalty does not read the advantage."""
        return True

    def select_tokens(self, flags: KlCovFlags, tokens: StepTokens) -> "np.ndarray":
        """Choose the largest covariances; the earlier token of those that are equal up to rounding."""
        from miles.objective.rounding import SCORES, largest, magnitude

        number = max(1, int(flags.kl_cov_fraction * len(tokens.log_probs)))
        return largest(covariances(tokens), number, SCORES * magnitude(tokens.advantages))

    def token_losses(self, flags: KlCovFlags, tokens: PolicyTokens) -> TokenLosses:
        """Add the penalty to the chosen tokens."""
        ratio = tokens.log_ratio.exp()
        losses = -tokens.advantages * ratio
        chosen = tokens.micro.selected
        if chosen is not None:
            is_abs = flags.kl_cov_penalty == "abs"
            penalty = tokens.log_ratio.abs() if is_abs else tokens.log_ratio.expm1() - tokens.log_ratio
            losses = losses + flags.kl_cov_coef * chosen * penalty
        return TokenLosses(losses, None)


def covariances(tokens: StepTokens) -> "np.ndarray":
    """Return ``(log p - mean) (A - mean)`` of each token, [T]: its part of their covariance over the step."""
    from miles.objective.rounding import FP32, SCORES, centred, magnitude

    advantages = centred(tokens.advantages, FP32 * magnitude(tokens.advantages))
    products: np.ndarray = centred(tokens.log_probs, SCORES) * advantages
    return products
