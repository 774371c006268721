"""Weights in the loss that change during a run: of the KL and of the entropy (adaptive.py).

After each optimizer step they adapt to its metrics, which are the same on every rank. So the weights are the same too,
without communication. A checkpoint has their state.
"""

from collections.abc import Mapping
from dataclasses import replace

from miles.objective.adaptive import AdaptiveEntropy, AdaptiveKl
from miles.objective.settings import LossArguments
from miles.types.metrics import Metric


class Coefficients:
    """The flags of the objective with the weights at present."""

    def __init__(self, loss: LossArguments) -> None:
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
    def loss(self) -> LossArguments:
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
