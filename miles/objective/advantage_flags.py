"""Declare the flags that every advantage estimator may read."""

from dataclasses import dataclass

from miles.base.flags import flag
from miles.objective.kl import KlFlags


@dataclass(frozen=True)
class AdvantageFlags(KlFlags):
    """loss: what is common to the advantage estimators."""

    normalize_advantages: bool = flag(
        False, "whiten the advantages over the response tokens of the step", needs="a policy that learns"
    )
