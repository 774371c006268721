"""Explain the objective of a step as a formula with this run's numbers, and in words: --explain and the run report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from miles.objective.aggregation import MODES
from miles.objective.chosen import build_objective
from miles.objective.registry import Term

if TYPE_CHECKING:
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments


@dataclass(frozen=True)
class AddedLoss:
    """A loss that the layers of the model compute, and that is added to the objective.

    Attributes:
        weight: Its weight.
        name: Its name in the formula.
        formula: Its definition.
        module: The module that computes it.
        words: The same for a sentence.
    """

    weight: float
    name: str
    formula: str
    module: str
    words: str


def objective_formula(loss: LossArguments, shape: StepShape, added: Sequence[AddedLoss] = ()) -> str:
    """Return the loss of one optimizer step with its numbers, some lines. ``loss`` is what validate() returns."""
    return "\n".join(term.text for term in objective_terms(loss, shape, added))


def objective_terms(loss: LossArguments, shape: StepShape, added: Sequence[AddedLoss] = ()) -> list[Term]:
    """Return the lines of ``objective_formula``, each with the module that computes it."""
    objective = build_objective(loss)
    first, *others = objective.loss_type.terms(objective, shape)
    whole = replace(first, text=first.text + "".join(f" + {each.weight:g} {each.name}" for each in added))
    return [whole, *others, *(Term(f"{each.name} = {each.formula}", each.module) for each in added)]


def objective_in_words(loss: LossArguments, shape: StepShape, added: Sequence[AddedLoss] = ()) -> str:
    """Return the same in sentences that a newcomer can read."""
    objective = build_objective(loss)
    what = objective.loss_type.words(objective)
    if loss.custom_pg_loss_reducer_function_path is not None:
        how = f"reduced by your function {loss.custom_pg_loss_reducer_function_path}"
    else:
        how = MODES[loss.loss_aggregation].words
    sentences = [f"Each step of {shape.num_trajectories} trajectories minimizes {what}, {how}."]
    if loss.has_critic and objective.loss_type.trains_policy:
        sentences.append("A critic is trained alongside it to predict each token's return.")
    if loss.kl_coef:
        sentences.append(
            f"The KL to the reference model is subtracted from each token's reward, weighted by {loss.kl_coef:g}."
        )
    computes = objective.loss_type.uses_policy_loss
    if loss.use_kl_loss and computes:
        sentences.append(
            f"The KL to the reference model ({loss.kl_loss_type}) is added, weighted by {loss.kl_loss_coef:g}."
            if loss.kl_loss_coef
            else f"The KL to the reference model ({loss.kl_loss_type}) is measured, and not part of the loss."
        )
    elif loss.use_kl_loss:
        sentences.append("Your loss is given the log-probs of the reference model; a KL in it is its own.")
    if loss.kl_target is not None:
        sentences.append(f"That weight is adapted so that the KL stays near {loss.kl_target:g}.")
    if loss.entropy_target is not None:
        sentences.append(f"Entropy is rewarded while it is {loss.entropy_target:g} or less, with a weight that adapts.")
    elif loss.entropy_coef and computes:
        verb = "rewarded" if loss.entropy_coef > 0 else "penalized"
        sentences.append(f"Entropy is {verb}, weighted by {abs(loss.entropy_coef):g}.")
    sentences += [f"The model adds {each.words}, weighted by {each.weight:g}." for each in added]
    return " ".join(sentences)


def objective_without_effect(loss: LossArguments, shape: StepShape) -> list[str]:
    """Return the flags of the objective that are valid and change nothing in this run, each with the reason."""
    objective, on_policy = build_objective(loss), shape.steps_per_iteration == 1
    idle = objective.loss_type.idle_on_policy(objective) if on_policy else []
    if loss.has_critic and on_policy:
        idle.append(
            "--value-clip: one step per iteration, so the critic's values are the old ones and nothing is clipped"
        )
    if loss.custom_pg_loss_reducer_function_path is not None:
        idle.append(
            "--loss-canary: what your reducer's weights add up to is not known beforehand, so nothing is checked"
        )
    return idle
