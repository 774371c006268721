"""Describe another trainer's aggregation, and find our mode that computes it or comes nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from miles.compat.translate.examples import LONGEST, STEPS, UNEVEN, Step, our_value
from miles.compat.translate.reductions import Reduction, distance
from miles.objective.aggregation import MODES, Aggregation


@dataclass(frozen=True)
class Objective:
    """Describe the aggregation that a configuration asks for.

    Attributes:
        setting: The setting that asks for it.
        formula: The sum that the gradient of a step is, after the framework's own averaging.
        source: Version or commit, and source file.
        reduce: The formula, in plain floats.
        mode: Our mode, and the words that ask for it.
        divisor: L of ``constant`` in the examples; ``None`` for 1/N, the N of each example.
        words: The flags that ask for our mode.
        depends: What changes the result there beside the batch; empty if nothing does.
        variants: Other things that the same setting computes, by the condition.
        exact: Whether our mode computes the same, whatever the batch.
        remarks: Further sentences.
    """

    setting: str
    formula: str
    source: str
    reduce: Reduction
    mode: Aggregation
    words: tuple[str, ...]
    divisor: float | None = float(LONGEST)
    depends: str = ""
    variants: Mapping[str, Reduction] = field(default_factory=dict)
    exact: bool = True
    remarks: tuple[str, ...] = ()

    @property
    def our_formula(self) -> str:
        """Our mode's formula."""
        return MODES[self.mode].formula

    def values(self) -> dict[str, list[float]]:
        """Return the value of the worked example and of the uneven batch, by the name of what computes it."""
        rows = {"there": [self.reduce(step) for step in STEPS]}
        rows |= {f"there, {when}": [reduce(step) for step in STEPS] for when, reduce in self.variants.items()}
        return rows | {mode: [self.ours(mode)(step) for step in STEPS] for mode in MODES}

    def ours(self, mode: Aggregation) -> Reduction:
        """Return one of our modes as a reduction, with this objective's divisor."""
        if self.divisor is None:
            return lambda step: our_value(mode, step, 1 / len(step.responses))
        return partial(_ours, mode, self.divisor)

    def nearest(self) -> Aggregation:
        """Return our mode whose token weights are nearest in the uneven batch."""
        return min(MODES, key=lambda mode: distance(self.reduce, self.ours(mode), UNEVEN))


def _ours(mode: Aggregation, divisor: float, step: Step) -> float:
    return our_value(mode, step, divisor)
