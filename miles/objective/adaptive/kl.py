"""Adapt the weight of the KL so that the KL stays near a target (``--kl-target``; Ziegler et al., arXiv 1909.08593).

Section 2.2 of the paper, in the form of its code and of verl's ``kl_ctrl.type=adaptive``, with the number of
trajectories over a horizon as the gain::

    e_t    = clip(KL_t / KL_target - 1, -0.2, 0.2)
    beta <- beta (1 + e_t N / horizon)

KL_t is the KL that the step reports: ``train/reward_kl``, a mean over tokens, or ``train/kl_loss``, a mean over
trajectories of their means over tokens. The paper's target is that of whole answers, this one that of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from miles.base.flags import flag
from miles.objective.registry import Term
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.base.flags import Errors

_LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class AdaptiveKlFlags:
    """loss: a target for the KL, to which its weight adapts."""

    kl_target: Optional[float] = flag(
        None,
        "adapt --kl-coef or --kl-loss-coef, which start as they are given, so that the KL per token stays near this",
    )
    kl_horizon: float = flag(10000.0, "trajectories over which --kl-target changes the weight of the KL")


def next_kl_weight(weight: float, kl: float, trajectories: int, target: float, horizon: float) -> float:
    """Return the weight after a step of so many ``trajectories`` whose KL was ``kl``.

    >>> next_kl_weight(0.1, kl=0.05, trajectories=1000, target=0.1, horizon=10000.0)
    0.098
    """
    error = min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return weight * (1 + error * trajectories / horizon)


class AdaptiveKl:
    """The weight of the KL in the reward or in the loss, whichever the run has."""

    def __init__(self, flags: Any) -> None:
        self.field = "kl_coef" if flags.kl_coef else "kl_loss_coef"
        self.value: float = getattr(flags, self.field)
        self._metric = "train/reward_kl" if flags.kl_coef else "train/kl_loss"
        self._target, self._horizon = flags.kl_target, flags.kl_horizon

    @property
    def settings(self) -> dict[str, Any]:
        """The flags of the objective as they are now."""
        return {self.field: self.value}

    def follow(self, metrics: Mapping[str, Metric], trajectories: int) -> None:
        """Adapt to the KL of a step."""
        if self._metric in metrics:  # a step without a loss token has none
            kl = metrics[self._metric].value
            self.value = next_kl_weight(self.value, kl, trajectories, self._target, self._horizon)

    def state(self) -> dict[str, float]:
        """Return what a checkpoint holds."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"]


def check_adaptive_kl(flags: Any, trajectories: int, errors: "Errors") -> None:
    """Check that a KL has a weight to adapt, and that no step of so many ``trajectories`` can make it negative."""
    errors.above(flags, 0, "kl_target", "kl_horizon")
    if flags.kl_target is None:
        errors.refuse_ignored(flags, ["kl_horizon"], "without --kl-target", "add --kl-target 0.1")
        return
    if not (flags.kl_coef or flags.kl_loss_coef):
        rule = "adapts the weight of a KL, and no KL is part of the reward or the loss"
        errors.refuse("kl_target", flags.kl_target, rule, "add --kl-coef 0.001, or --use-kl-loss --kl-loss-coef 0.001")
    shortest = _LARGEST_ERROR * trajectories
    if errors.none_about("kl_horizon") and flags.kl_horizon <= shortest:
        rule = f"a step of {trajectories} trajectories could make the weight negative"
        errors.refuse("kl_horizon", flags.kl_horizon, rule, f"give more than {shortest:g} (10000 is usual)")


def adaptive_kl_formula(flags: Any) -> list[Term]:
    """Return how the weight changes, if it does."""
    if flags.kl_target is None:
        return []
    field = AdaptiveKl(flags).field
    error = f"clip(KL / {flags.kl_target:g} - 1, -0.2, 0.2)"
    return [Term(f"{field} <- {field} (1 + {error} N / {flags.kl_horizon:g}) after each step", __name__)]
