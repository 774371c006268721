"""Declare the flags that every advantage estimator may read."""

from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.kl import KlEstimator


@dataclass(frozen=True)
class AdvantageFlags:
    """loss: what is common to the advantage estimators."""

    normalize_advantages: bool = flag(
        False, "whiten the advantages over the response tokens of the step", needs="a policy that learns"
    )
    kl_coef: float = flag(
        0.0, "weight of the KL to the reference model in each token's reward; excludes --kl-loss-coef", at_least=0
    )
    kl_loss_type: KlEstimator = flag(
        "k1",
        "estimator of the KL, in the loss or the reward; low_var_kl is k3 clamped to [-10, 10]; k1+ and k3+ have the "
        "gradient of k2",
        needs="a KL",
    )
