"""Define the common base of the objective's parts that flags choose: estimators, policy losses and loss types."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from miles.base.choices import Choice, F

if TYPE_CHECKING:
    from miles.base.flags import Errors


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
class Needs:
    """Name the quantities that the trainer scores before the loss is computed.

    Attributes:
        old_log_probs: Log-probs of the policy before the first step of the iteration, in every step. Without this they
            are scored from the second step on; in the first step they are the current ones.
        ref_log_probs: Log-probs of the reference model.
        teacher_log_probs: Log-probs of the teacher that is distilled.
        values: Values of a critic, which is trained alongside the policy.
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


@dataclass(frozen=True)
class StepShape:
    """Hold the facts of a run that the objective knows alongside its own flags.

    Attributes:
        num_trajectories: N, the trajectories of an optimizer step.
        samples_per_prompt: The trajectories of a group.
        steps_per_iteration: Optimizer steps taken from the samples of one iteration.
        critic_only_iterations: Iterations at the start of the run where only the critic learns.
        users_advantages: The call of the user's function outside of the objective that makes the advantages of samples
            instead of the estimator's first phase; None without one.
    """

    num_trajectories: int
    samples_per_prompt: int
    steps_per_iteration: int = 1
    critic_only_iterations: int = 0
    users_advantages: Term | None = None


class ObjectivePart(Choice[F]):
    """A part of the objective that a flag chooses. Objects have no state.

    ``flags`` are the run's ``LossArguments``; the part sees only the flags of its dataclass.
    """

    def needs(self, flags: F) -> Needs:
        """Return the quantities that the trainer scores for it."""
        return Needs()

    def check(self, flags: F, shape: StepShape, errors: Errors) -> None:
        """Report the rules that ``flags`` break."""
        return None

    def zero_advantage_has_gradient(self, flags: F) -> bool:
        """Return whether a sample can have a gradient although its advantage is 0 on the rollout side."""
        return False
