"""Adapt the weight of the KL so that the KL stays near a target (``--kl-target``; Ziegler et al., arXiv 1909.08593).

Section 2.2 of the paper, in the form of its code and of verl's ``kl_ctrl.type=adaptive``, with the number of
trajectories over a horizon as the gain::

    e_t    = clip(KL_t / KL_target - 1, -0.2, 0.2)
    beta <- beta (1 + e_t N / horizon)

KL_t is the KL that the step reports: ``train/reward_kl``, a mean over tokens, or ``train/kl_loss``, a mean over
trajectories of their means over tokens. The paper's target is the KL of a whole answer, this one the KL of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

from miles.base.flags import Errors, flag
from miles.objective.kl import KlFlags
from miles.objective.registry import Term
from miles.types.metrics import Metric

if TYPE_CHECKING:
    from miles.objective.settings import LossArguments

_LARGEST_ERROR = 0.2


@dataclass(frozen=True)
class AdaptiveKlFlags(KlFlags):
    """loss: a target for the KL, to which its weight adapts."""

    kl_target: Optional[float] = flag(
        None,
        "adapt --kl-coef or --kl-loss-coef, which start as given, so that the KL per token stays near this",
        above=0,
    )
    kl_horizon: float = flag(
        10000.0, "trajectories over which --kl-target changes the weight of the KL", above=0, needs="--kl-target"
    )


def next_kl_weight(weight: float, kl: float, trajectories: int, target: float, horizon: float) -> float:
    """Return the weight after a step of so many ``trajectories`` whose KL was ``kl``.

    >>> next_kl_weight(0.1, kl=0.05, trajectories=1000, target=0.1, horizon=10000.0)
    0.098
    """
    error = min(max(kl / target - 1, -_LARGEST_ERROR), _LARGEST_ERROR)
    return weight * (1 + error * trajectories / horizon)


class AdaptiveKl:
    """The weight of the KL in the reward or in the loss, whichever the run has."""

    def __init__(self, flags: AdaptiveKlFlags) -> None:
        self.field = "kl_coef" if flags.kl_coef else "kl_loss_coef"
        self.value: float = getattr(flags, self.field)
        self._metric = "train/reward_kl" if flags.kl_coef else "train/kl_loss"
        assert flags.kl_target is not None, "without a target no weight adapts"
        self._target, self._horizon = flags.kl_target, flags.kl_horizon

    @property
    def settings(self) -> dict[str, Any]:
        """The flags of the objective at present."""
        return {self.field: self.value}

    def follow(self, metrics: Mapping[str, Metric], trajectories: int) -> None:
        """Adapt to the KL of a step."""
        if self._metric in metrics:  # a step without a loss token has none
            kl = metrics[self._metric].value
            self.value = next_kl_weight(self.value, kl, trajectories, self._target, self._horizon)

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint holds."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value = state["value"]


def check_adaptive_kl(flags: AdaptiveKlFlags, trajectories: int, errors: Errors) -> None:
    """Check that a KL has a weight to adapt, and that no step of so many ``trajectories`` can make it negative."""
    if flags.kl_target is None:
        return
    if not (flags.kl_coef or flags.kl_loss_coef):
        rule = "adapts the weight of a KL, and no KL is part of the reward or the loss"
        errors.refuse("kl_target", flags.kl_target, rule, "add --kl-coef 0.001, or --use-kl-loss --kl-loss-coef 0.001")
    shortest = _LARGEST_ERROR * trajectories
    if errors.none_about("kl_horizon") and flags.kl_horizon <= shortest:
        rule = f"a step of {trajectories} trajectories could make the weight negative"
        errors.refuse("kl_horizon", flags.kl_horizon, rule, f"give more than {shortest:g} (10000 is usual)")


def adaptive_kl_formula(flags: AdaptiveKlFlags) -> list[Term]:
    """Return how the weight changes, if it does."""
    if flags.kl_target is None:
        return []
    field = AdaptiveKl(flags).field
    error = f"clip(KL / {flags.kl_target:g} - 1, -0.2, 0.2)"
    return [Term(f"{field} <- {field} (1 + {error} N / {flags.kl_horizon:g}) after each step", __name__)]


# Adapt the weight of the entropy so that the entropy does not fall below a target (``--entropy-target``).
#
# Skywork-OR1 (arXiv 2505.22312, section "Adaptive Entropy Control"), with TRL's names and bounds. With e_k the entropy
# of step k::
#
#     c_{k+1} = min(c_k + delta, max)    if e_k <= target,    else max(c_k - delta, min)
#     alpha_{k+1} = c_{k+1} if e_k <= target else 0
#
# alpha is the weight in the loss. c starts at ``--entropy-coef``. In the paper alpha_k is 0 if e_k itself is above the
# target; a step knows its entropy when its loss is computed, so here, as in TRL, the entropy of the step before
# decides.


@dataclass(frozen=True)
class AdaptiveEntropyFlags:
    """loss: the weight of the entropy, and the entropy below which it is rewarded."""

    entropy_coef: float = flag(0.0, "weight of the entropy bonus subtracted from the loss")
    entropy_target: Optional[float] = flag(
        None,
        "reward entropy up to this, in nats per token, with a weight that starts at --entropy-coef and adapts",
        above=0,
    )
    entropy_coef_delta: float = flag(
        0.005,
        "how much --entropy-target changes the weight after each optimizer step",
        above=0,
        needs="--entropy-target",
    )
    entropy_coef_min: float = flag(0.0, "smallest weight of --entropy-target", at_least=0, needs="--entropy-target")
    entropy_coef_max: float = flag(1.0, "largest weight of --entropy-target", at_least=0, needs="--entropy-target")


class AdaptiveEntropy:
    """The weight of the entropy. ``is_low`` states whether the entropy of the last step was at the target or below."""

    field = "entropy_coef"

    def __init__(self, flags: AdaptiveEntropyFlags) -> None:
        self._flags = flags
        self.value: float = flags.entropy_coef
        self.is_low = True

    @property
    def settings(self) -> dict[str, Any]:
        """The flags of the objective at present."""
        return {self.field: self.value if self.is_low else 0.0}

    def follow(self, metrics: Mapping[str, Metric], trajectories: int) -> None:
        """Adapt to the entropy of a step."""
        if "train/entropy_loss" not in metrics:  # a step without a loss token has none
            return
        flags = self._flags
        assert flags.entropy_target is not None, "without a target no weight adapts"
        self.is_low = metrics["train/entropy_loss"].value <= flags.entropy_target
        if self.is_low:
            self.value = min(self.value + flags.entropy_coef_delta, flags.entropy_coef_max)
        else:
            self.value = max(self.value - flags.entropy_coef_delta, flags.entropy_coef_min)

    def state(self) -> dict[str, float]:
        """Return the state that a checkpoint holds."""
        return {"value": self.value, "is_low": float(self.is_low)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint."""
        self.value, self.is_low = state["value"], bool(state["is_low"])


def check_adaptive_entropy(flags: AdaptiveEntropyFlags, errors: Errors) -> None:
    """Check the target and the bounds."""
    if flags.entropy_target is None:
        return
    low, high = flags.entropy_coef_min, flags.entropy_coef_max
    if errors.none_about("entropy_coef", "entropy_coef_min", "entropy_coef_max") and not (
        low <= flags.entropy_coef <= high
    ):
        rule = f"must be between --entropy-coef-min {low:g} and --entropy-coef-max {high:g} with --entropy-target"
        errors.refuse("entropy_coef", flags.entropy_coef, rule, "change one of the three")


def adaptive_entropy_formula(flags: AdaptiveEntropyFlags) -> list[Term]:
    """Return how the weight changes, if it does."""
    if flags.entropy_target is None:
        return []
    low, high, delta = flags.entropy_coef_min, flags.entropy_coef_max, flags.entropy_coef_delta
    text = (
        f"entropy weight: c +- {delta:g} in [{low:g}, {high:g}] after each step, + if the entropy is at most "
        f"{flags.entropy_target:g}, else -, and 0 instead of c"
    )
    return [Term(text, __name__)]


# Both weights during a run. After each optimizer step they adapt to its metrics, which are the same on every rank. So
# the weights are the same too, without communication. A checkpoint has their state.


class Coefficients:
    """The flags of the objective with the weights at present."""

    def __init__(self, loss: "LossArguments") -> None:
        self._loss = loss
        self._adaptive: list[AdaptiveKl | AdaptiveEntropy] = []
        if loss.kl_target is not None:
            self._adaptive.append(AdaptiveKl(loss))
        if loss.entropy_target is not None:
            self._adaptive.append(AdaptiveEntropy(loss))

    @property
    def adapt(self) -> bool:
        """Whether any weight changes."""
        return bool(self._adaptive)

    @property
    def loss(self) -> "LossArguments":
        """The flags, to compute the next step with."""
        changed = {name: value for part in self._adaptive for name, value in part.settings.items()}
        return replace(self._loss, **changed) if changed else self._loss

    def metrics(self) -> dict[str, Metric]:
        """Return the weights of the next step, ``train/kl_coef`` and the like."""
        return {f"train/{name}": Metric(value) for part in self._adaptive for name, value in part.settings.items()}

    def metrics_in_advantages(self) -> dict[str, Metric]:
        """Return the weights that advantages are made with: later steps of their iteration keep these."""
        return {name: metric for name, metric in self.metrics().items() if name == "train/kl_coef"}

    def follow(self, metrics: Mapping[str, Metric], trajectories: int) -> None:
        """Adapt every weight to the metrics of a step of so many trajectories."""
        for part in self._adaptive:
            part.follow(metrics, trajectories)

    def state(self) -> dict[str, dict[str, float]]:
        """Return the state that a checkpoint holds, by flag."""
        return {part.field: part.state() for part in self._adaptive}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Continue from a checkpoint. A weight that it does not have, of a run without the flag, stays as given."""
        for part in self._adaptive:
            if part.field in state:
                part.restore(state[part.field])
