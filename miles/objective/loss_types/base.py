"""Define a loss type: the loss of the language model, and the properties that the rest of a run depends on."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from miles.objective.distillation import distillation_formula
from miles.objective.registry import Needs, ObjectivePart, Term
from miles.objective.value_loss import value_loss_formula

if TYPE_CHECKING:
    import torch

    from miles.objective.chosen import Objective
    from miles.objective.output import LossOutput
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


class LossType(ObjectivePart[Any]):
    """A loss type.

    Attributes:
        uses_advantages: Whether rewards become advantages. If not, rewards are not read, and samples need not have any.
        uses_policy_loss: Whether ``--policy-loss``, corrections, KL and entropy make up the loss.
        trains_policy: Whether the policy learns. If not, only the critic does.
        loss_mass_is_known: Whether the weights of all tokens add up to a number that is known when the batch is built.
        reads_any: Whether it is the user's, and may read any flag.
        lacks: The flags that ask for a part of the objective that it does not have. They are refused if they are set,
            with ``instead_of_lacking``.
    """

    flag: ClassVar[str] = "loss_type"
    uses_advantages: bool = True
    uses_policy_loss: bool = False
    trains_policy: bool = True
    loss_mass_is_known: bool = False
    reads_any: bool = False
    lacks: tuple[str, ...] = ()
    instead_of_lacking: str = "use --loss-type policy_loss"

    def needs_of(self, objective: Objective) -> Needs:
        """Return the trainer's scores: inputs of the estimator, and the reference for ``--use-kl-loss``."""
        flags = objective.flags
        return objective.estimator.needs(flags) | Needs(ref_log_probs=flags.use_kl_loss)

    @abstractmethod
    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the lines of the formula that it computes, each with the module that computes it."""

    @abstractmethod
    def words(self, objective: Objective) -> str:
        """Name the quantity that a step minimizes, in a few words."""

    @abstractmethod
    def language_model_loss(
        self,
        objective: Objective,
        micro: MicroBatch,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        canary: torch.Tensor | None,
    ) -> LossOutput:
        """Compute the loss of one micro-batch from a model's ``log_probs`` and ``entropy``, [R]."""

    def idle_on_policy(self, objective: Objective) -> list[str]:
        """Say which flags have no effect if an iteration has one step, so that every ratio is 1."""
        return []

    def zero_advantage_has_gradient(self, flags: LossArguments) -> bool:
        """Return true unless the loss is known to vanish with the advantage."""
        return True


def advantage_terms(objective: Objective, shape: StepShape) -> list[Term]:
    """Return the formulas of A and of the critic's loss. The index t counts the loss tokens of a trajectory."""
    flags = objective.flags
    terms = value_loss_formula(flags, shape) if objective.needs.values else []
    terms += _estimate(objective, shape)
    terms += distillation_formula(flags)
    if flags.normalize_advantages:
        text = "A is whitened: (A - mean) / std over the loss tokens of the step"
        terms.append(Term(text, "miles.objective.token_advantages"))
    path = flags.rollout_data_postprocess_path
    if path is not None:
        terms.append(Term(f"A is then what {path}(...) makes of it", "miles.batch.convert", path))
    if flags.drop_zero_std_groups:
        text = "a step is without the groups whose A are all 0, and its counts too, unless it has no other groups"
        terms.append(Term(text, "miles.batch.convert"))
    return terms


def _estimate(objective: Objective, shape: StepShape) -> list[Term]:
    """Return the estimator's formula, or the replacement of its first phase."""
    estimator, given = objective.estimator, shape.given_advantages
    if given is None:
        return estimator.formula(objective.flags)
    if not estimator.by_token:
        return [replace(given, text=f"A = {given.text} instead of --advantage-estimator {estimator.name}")]
    rewards = replace(given, text=f"reward, or its difference from a mean, is what {given.text} says")
    return [*estimator.formula(objective.flags), rewards]
