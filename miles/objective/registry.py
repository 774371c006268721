"""What the parts of the objective that flags choose have in common: estimators, policy losses and loss types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from miles.base.choices import Choice

if TYPE_CHECKING:
    from miles.base.flags import Errors
    from miles.objective.settings import StepShape


@dataclass(frozen=True)
class Term:
    """A line of the formula that ``--explain`` prints, and what computes it.

    Attributes:
        text: The line.
        module: The module that computes it.
        hook: The import path of the user's function that computes it instead, as it was given.
    """

    text: str
    module: str
    hook: str | None = None

    @property
    def source(self) -> str:
        """What computes it: a file such as ``miles/objective/kl.py``, or the user's function."""
        return self.module.replace(".", "/") + ".py" if self.hook is None else self.hook


@dataclass(frozen=True)
class Variant:
    """A setting of a part that has a name and a source of its own: a row of the docs' page of objectives.

    Attributes:
        name: The name.
        settings: The flags that choose it, with their values.
        sources: Its origin: arXiv numbers, addresses, or a few words.
    """

    name: str
    settings: Mapping[str, Any]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """What the trainer scores before the loss is computed.

    Attributes:
        old_log_probs: Log-probs of the policy before the first step of the iteration, in every step. Without this they
            are scored from the second step on; in the first step they are the current ones.
        ref_log_probs: Log-probs of the reference model.
        teacher_log_probs: Log-probs of the teacher that is distilled.
        values: Values of a critic, which is trained beside the policy.
        entropy: The entropy of the policy, with the current log-probs.
        sum_squared_probs: The sum over the vocabulary of the policy's squared probabilities, with the old log-probs.
    """

    old_log_probs: bool = False
    ref_log_probs: bool = False
    teacher_log_probs: bool = False
    values: bool = False
    entropy: bool = False
    sum_squared_probs: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(**{field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)})


class ObjectivePart(Choice):
    """A part of the objective that a flag chooses. Objects have no state; ``flags`` are the run's ``LossArguments``."""

    def needs(self, flags: Any) -> Needs:
        """Return what the trainer scores for it."""
        return Needs()

    def check(self, flags: Any, shape: StepShape, errors: Errors) -> None:
        """Report the rules that ``flags`` break."""
        return None

    def zero_advantage_has_gradient(self, flags: Any) -> bool:
        """Return whether a sample whose advantage is 0 on the rollout side can have a gradient all the same."""
        return False
