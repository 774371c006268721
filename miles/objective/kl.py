"""Estimate KL(policy || reference) from one sampled token each (http://joschu.net/blog/kl-approx.html).

The KL is part of the loss (``--use-kl-loss``), or of each token's reward (``--kl-coef``).

In the loss, an estimator with the right value can have the wrong gradient, because the probability of the sampled token
depends on the policy too (arXiv 2506.09477). In expectation, the gradient of k1 is 0, k3 has the gradient of
KL(reference || policy), and the gradient of k2 is right on-policy. Two ways to the gradient of KL(policy || reference):

- ``k1+`` and ``k3+`` (verl's names) report k1 and k3 and have the gradient of k2;
- ``--use-unbiased-kl`` multiplies the estimate by the importance ratio, gradient included (DeepSeek-V3.2, 2512.02556,
  section 3.1), which is right off-policy too.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles.base.flags import Errors, flag
from miles.objective.registry import Term

if TYPE_CHECKING:
    import torch

KlEstimator = Literal["k1", "k2", "k3", "low_var_kl", "k1+", "k3+"]


@dataclass(frozen=True)
class KlFlags:
    """loss: the KL to the reference model, in each token's reward or in the loss."""

    kl_coef: float = flag(
        0.0, "weight of the KL to the reference model in each token's reward; excludes --kl-loss-coef", at_least=0
    )
    kl_loss_type: KlEstimator = flag(
        "k1",
        "estimator of the KL, in the loss or the reward; low_var_kl is k3 clamped to [-10, 10]; k1+ and k3+ have the "
        "gradient of k2",
        needs="a KL",
    )
    use_kl_loss: bool = flag(
        False, "add the KL to the reference model to the loss (with coefficient 0: only measure it)"
    )
    kl_loss_coef: float = flag(0.0, "weight of the KL in the loss", at_least=0, needs="--use-kl-loss")
    use_unbiased_kl: bool = flag(
        False,
        "weight the KL in the loss by the importance ratio, so that its gradient is the KL's",
        needs="a KL in the loss",
    )

    @property
    def adds_kl(self) -> bool:
        """Whether the KL to the reference model is part of the loss."""
        return self.use_kl_loss and self.kl_loss_coef != 0

    @property
    def needs_reference(self) -> bool:
        """Whether the log-probs of a reference model are read."""
        return self.use_kl_loss or self.kl_coef != 0


# The estimate of a token, with d = log p - log p_reference.
KL_FORMS: dict[KlEstimator, str] = {
    "k1": "d",
    "k2": "d² / 2",
    "k3": "exp(-d) - 1 + d",
    "low_var_kl": "clip(exp(-d) - 1 + d, -10, 10)",
    "k1+": "d, with the gradient of d² / 2",
    "k3+": "exp(-d) - 1 + d, with the gradient of d² / 2",
}
_VALUES: dict[KlEstimator, KlEstimator] = {"k1+": "k1", "k3+": "k3"}  # of estimators with the gradient of k2

# exp(88.8) overflows fp32. Bounded below that, no ratio is infinite, so none meets a zero advantage or gradient as NaN.
_BOUND = 80.0


def masked_log_ratio(log_probs: "torch.Tensor", reference: "torch.Tensor", loss_mask: "torch.Tensor") -> "torch.Tensor":
    """Subtract log-probs in a form that is safe to exponentiate.

    Returns:
        ``log_probs - reference`` in fp32, [R], within +-80; 0 without gradient where ``loss_mask`` is 0. Masked values
        may be anything, NaN and infinities included; the others must be numbers.
    """
    difference = log_probs.float() - reference.float()
    return difference.masked_fill(loss_mask == 0, 0.0).clamp(-_BOUND, _BOUND)


def approximate_kl(log_ratio: "torch.Tensor", estimator: KlEstimator) -> "torch.Tensor":
    """Estimate the KL per token from ``log_ratio = log policy - log reference`` of tokens sampled from the policy; [R].

    ``k1`` is unbiased and may be negative; ``k2`` is biased, never negative; ``k3`` is unbiased and never negative;
    ``low_var_kl`` is k3 clamped to [-10, 10]. ``k1+`` and ``k3+`` have these values and the gradient of k2.
    """
    if estimator in _VALUES:
        k2 = approximate_kl(log_ratio, "k2")
        return k2 - k2.detach() + approximate_kl(log_ratio.detach(), _VALUES[estimator])
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    k3 = (-log_ratio).expm1() + log_ratio
    if estimator == "k3":
        return k3
    if estimator == "low_var_kl":
        return k3.clamp(-10.0, 10.0)
    raise ValueError(f"--kl-loss-type {estimator}: no such estimator; give one of {', '.join(KL_FORMS)}")


def check_kl(loss: KlFlags, errors: Errors) -> None:
    """Report coefficients that count the KL twice, and corrections that exclude each other."""
    if loss.kl_coef and loss.kl_loss_coef:
        rule = f"alongside --kl-loss-coef {loss.kl_loss_coef:g} counts the KL twice, in the reward and in the loss"
        errors.refuse("kl_coef", loss.kl_coef, rule, "keep one of the two")
    if loss.kl_loss_type in _VALUES and loss.use_unbiased_kl:
        rule = "corrects the gradient of the KL, as --use-unbiased-kl does"
        what_to_do = f"use {_VALUES[loss.kl_loss_type]}, or drop --use-unbiased-kl"
        errors.refuse("kl_loss_type", loss.kl_loss_type, rule, what_to_do)
    if loss.kl_loss_type in _VALUES and loss.kl_coef:
        rule = "differs in its gradient only, and the KL in the reward has none"
        errors.refuse("kl_loss_type", loss.kl_loss_type, rule, f"use {_VALUES[loss.kl_loss_type]}")


def kl_formula(loss: KlFlags) -> list[Term]:
    """Return the KL of a token in the loss, if it is part of the loss."""
    if not loss.adds_kl:
        return []
    formula = KL_FORMS[loss.kl_loss_type]
    if loss.use_unbiased_kl:
        formula = f"ρ ({formula})"
    return [Term(f"KL_{loss.kl_loss_type} = {formula} of each token, d = log p - log p_reference", __name__)]


def reward_penalty(loss: KlFlags) -> str:
    """Return the penalty that is subtracted from a token's reward, as the end of a formula."""
    return f" - {loss.kl_coef:g} KL_{loss.kl_loss_type}(p_old, reference)" if loss.kl_coef else ""
