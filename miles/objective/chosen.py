"""Build the objective that a run uses, once from its flags, with every part found by its name; check its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from miles.base.flags import changed
from miles.objective.adaptive import check_adaptive_entropy
from miles.objective.aggregation import MODES
from miles.objective.distillation import check_distillation
from miles.objective.estimators import ESTIMATORS
from miles.objective.hooks import CustomAdvantages, CustomPolicyLoss
from miles.objective.kl import check_kl
from miles.objective.loss_types import LOSS_TYPES
from miles.objective.loss_types.base import Objective
from miles.objective.policy_losses import POLICY_LOSSES
from miles.objective.registry import Term
from miles.objective.token_weights import check_token_weights, token_weights_of

if TYPE_CHECKING:
    from miles.base.flags import Errors
    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments


@lru_cache
def build_objective(loss: LossArguments) -> Objective:
    """Find the parts that ``loss`` names. Raises ``ValueError`` for a name that no file has."""
    estimator = ESTIMATORS[loss.advantage_estimator]
    if loss.custom_advantage_function_path is not None:
        estimator = CustomAdvantages(loss.custom_advantage_function_path, estimator)
    policy_loss = POLICY_LOSSES[loss.policy_loss or estimator.default_policy_loss]
    if loss.custom_policy_loss_function_path is not None:
        policy_loss = CustomPolicyLoss(loss.custom_policy_loss_function_path)
    return Objective(loss, LOSS_TYPES[loss.loss_type], estimator, policy_loss, token_weights_of(loss))


def check_objective(loss: LossArguments, shape: StepShape, errors: Errors) -> None:
    """Report every rule of the objective that ``loss`` breaks, the aggregation apart (``reconcile_aggregation``).

    Args:
        loss: The flags, as they were given.
        shape: The step.
        errors: Collects them.
    """
    if loss.log_probs_chunk_size != -1 and loss.log_probs_chunk_size < 1:
        rule = "must be -1 (all tokens) or at least 1"
        errors.refuse("log_probs_chunk_size", loss.log_probs_chunk_size, rule, "1024 is usual")
    objective = build_objective(loss)
    objective.policy_loss.check(loss, shape, errors)
    check_kl(loss, errors)
    check_distillation(loss, errors)
    check_token_weights(loss, errors)
    check_adaptive_entropy(loss, errors)
    if objective.loss_type.uses_advantages:
        objective.estimator.check(loss, shape, errors)
    objective.loss_type.check(loss, shape, errors)
    _check_contradictions(objective, errors)


def _check_contradictions(objective: Objective, errors: Errors) -> None:
    """Report parts that exclude each other, and flags that ask for a part that this objective does not have."""
    flags, loss_type = objective.flags, objective.loss_type
    for name in changed(flags, [*LOSS_TYPES.reads, *loss_type.lacks]):
        if name not in loss_type.reads:
            readers = LOSS_TYPES.readers(name)
            rule = f"is no part of --loss-type {loss_type.name}"
            what_to_do = f"use --loss-type {' or '.join(readers)}" if readers else loss_type.instead_of_lacking
            errors.refuse(name, getattr(flags, name), rule, f"{what_to_do}, or drop it")
    if loss_type.uses_advantages:
        ESTIMATORS.check_instead(objective.estimator, flags, errors)
    if flags.use_opd and not (loss_type.uses_advantages and loss_type.trains_policy):
        rule = f"contradicts --loss-type {flags.loss_type}: the policy learns from no advantages"
        errors.refuse("use_opd", True, rule, "use --loss-type policy_loss, or drop it")
    if flags.use_opsm and (flags.use_opd or ESTIMATORS[flags.advantage_estimator].by_token):
        if flags.use_opd:
            other = "--use-opd gives each token its own advantage"
            what_to_do = "drop one of the two"
        else:
            other = f"--advantage-estimator {flags.advantage_estimator} has one for each token"
            what_to_do = "use --advantage-estimator grpo"
        errors.refuse("use_opsm", True, f"drops sequences of negative advantage, and {other}", what_to_do)
    if loss_type.uses_policy_loss and flags.policy_loss is not None and flags.custom_policy_loss_function_path:
        rule = "names a second policy loss, alongside --custom-policy-loss-function-path"
        errors.refuse("policy_loss", flags.policy_loss, rule, "keep one of the two")


# Explain the objective of a step as a formula with this run's numbers, and in words: --explain and the run report.


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
    has_policy_loss = objective.loss_type.uses_policy_loss
    if loss.use_kl_loss and has_policy_loss:
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
    elif loss.entropy_coef and has_policy_loss:
        verb = "rewarded" if loss.entropy_coef > 0 else "penalized"
        sentences.append(f"Entropy is {verb}, weighted by {abs(loss.entropy_coef):g}.")
    sentences += [f"The model adds {each.words}, weighted by {each.weight:g}." for each in added]
    return " ".join(sentences)


def objective_without_effect(loss: LossArguments, shape: StepShape) -> list[str]:
    """Return the flags of the objective that are valid and change nothing in this run, each with the reason."""
    objective = build_objective(loss)
    on_policy = shape.steps_per_iteration == 1
    notes = objective.loss_type.idle_on_policy(objective) if on_policy else []
    if loss.has_critic and on_policy:
        why = "one step per iteration, so the critic's values are the old ones and nothing is clipped"
        notes.append(f"--value-clip: {why}")
    if loss.custom_pg_loss_reducer_function_path is not None:
        why = "what your reducer's weights add up to is not known beforehand, so nothing is checked"
        notes.append(f"--loss-canary: {why}")
    return notes
