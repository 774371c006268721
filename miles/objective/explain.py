"""Explain the objective of a step as a formula with this run's numbers, and in words: --explain and the run report."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from miles.objective.aggregation import MODES, aggregation_formula
from miles.objective.chosen import Objective, build_objective
from miles.objective.corrections import corrections_formula
from miles.objective.kl import kl_formula
from miles.objective.registry import Term
from miles.objective.value_loss import value_loss_formula

if TYPE_CHECKING:
    from miles.objective.settings import LossArguments, StepShape

_POLICY_OBJECTIVE = "miles.objective.policy_objective"


def objective_formula(loss: LossArguments, shape: StepShape) -> str:
    """Return the loss of one optimizer step with its numbers, some lines. ``loss`` is what validate() returns."""
    return "\n".join(term.text for term in objective_terms(loss, shape))


def objective_terms(loss: LossArguments, shape: StepShape) -> list[Term]:
    """Return the lines of ``objective_formula``, each with the module that computes it."""
    objective = build_objective(loss)
    if loss.loss_type == "sft_loss":
        token_loss = Term("l_it = -log p(token t of sample i)", "miles.objective.sft")
        return [*aggregation_formula("loss", loss, shape), token_loss]
    if loss.loss_type == "value_loss":
        whole = Term("loss = value_loss of the critic; the policy stays as it is", "miles.objective.value_loss")
        return [whole, *_advantages(objective, shape)]
    if loss.loss_type == "policy_loss":
        return [*_policy_loss(objective, shape), *_advantages(objective, shape)]
    if loss.loss_type == "custom_loss":
        whole = Term(f"loss = {loss.custom_loss_function_path}(log p, log p_old, A, ...)", "miles.objective.hook_calls")
        return [whole, *aggregation_formula("reduce(l)", loss, shape), *_advantages(objective, shape)]
    raise ValueError(f"--loss-type {loss.loss_type}: no such loss")


def _policy_loss(objective: Objective, shape: StepShape) -> list[Term]:
    loss = objective.flags
    terms = ["pg_loss"]
    if loss.use_kl_loss and loss.kl_loss_coef:
        terms.append(f"+ {loss.kl_loss_coef:g} KL_{loss.kl_loss_type}(policy, reference)")
    if loss.entropy_coef:
        sign = "-" if loss.entropy_coef > 0 else "+"
        terms.append(f"{sign} {abs(loss.entropy_coef):g} entropy")
    weights = corrections_formula(loss)
    first, *rest = objective.policy_loss.formula(loss)
    text = f"w ({first.text})" if weights and first.text.startswith("-") else f"{'w ' if weights else ''}{first.text}"
    token_loss = replace(first, text=f"l_it = {text}")
    lines = [Term("loss = " + " ".join(terms), _POLICY_OBJECTIVE), *aggregation_formula("pg_loss", loss, shape)]
    return [*lines, token_loss, *rest, *weights, *kl_formula(loss), *_entropy(loss)]


def _entropy(loss: LossArguments) -> list[Term]:
    text = "entropy = -Σ p log p over the vocabulary, of each token"
    return [Term(text, "miles.objective.token_log_probs")] if loss.entropy_coef else []


def _advantages(objective: Objective, shape: StepShape) -> list[Term]:
    """Return what A is, and what the critic learns. The index t counts the loss tokens of a trajectory, up to T."""
    loss = objective.flags
    terms = [*value_loss_formula(loss, shape)] if objective.needs.values else []
    terms += objective.estimator.formula(loss)
    if loss.normalize_advantages and loss.loss_type != "value_loss":
        text = "A is whitened: (A - mean) / std over the loss tokens of the step"
        terms.append(Term(text, "miles.objective.token_advantages"))
    return terms


def objective_in_words(loss: LossArguments, shape: StepShape) -> str:
    """Return the same in sentences that a newcomer can read."""
    what = {
        "policy_loss": f"the policy-gradient loss ({build_objective(loss).policy_loss.summary})",
        "value_loss": "the critic's clipped squared error",
        "sft_loss": "the negative log-likelihood",
        "custom_loss": f"your loss {loss.custom_loss_function_path}",
    }[loss.loss_type]
    if loss.custom_pg_loss_reducer_function_path is not None:
        how = f"reduced by your function {loss.custom_pg_loss_reducer_function_path}"
    else:
        how = MODES[loss.loss_aggregation].words
    sentences = [f"Each step of {shape.num_trajectories} trajectories minimizes {what}, {how}."]
    if loss.has_critic and loss.loss_type == "policy_loss":
        sentences.append("A critic is trained beside it to predict each token's return.")
    if loss.kl_coef:
        sentences.append(
            f"The KL to the reference model is subtracted from each token's reward, weighted by {loss.kl_coef:g}."
        )
    if loss.use_kl_loss:
        sentences.append(
            f"The KL to the reference model ({loss.kl_loss_type}) is added, weighted by {loss.kl_loss_coef:g}."
            if loss.kl_loss_coef
            else f"The KL to the reference model ({loss.kl_loss_type}) is measured, and not part of the loss."
        )
    if loss.entropy_coef:
        verb = "rewarded" if loss.entropy_coef > 0 else "penalized"
        sentences.append(f"Entropy is {verb}, weighted by {abs(loss.entropy_coef):g}.")
    return " ".join(sentences)


def objective_without_effect(loss: LossArguments, shape: StepShape) -> list[str]:
    """Return the flags of the objective that are valid and change nothing in this run, each with the reason."""
    objective, on_policy = build_objective(loss), shape.steps_per_iteration == 1
    idle = []
    if loss.loss_type == "policy_loss" and on_policy:
        idle += objective.policy_loss.idle_on_policy(loss)
        if loss.use_opsm:
            idle.append("--use-opsm: one step per iteration, so no sequence is away from the old policy")
    if loss.has_critic and on_policy:
        idle.append(
            "--value-clip: one step per iteration, so the critic's values are the old ones and nothing is clipped"
        )
    if loss.custom_pg_loss_reducer_function_path is not None:
        idle.append(
            "--loss-canary: what your reducer's weights add up to is not known beforehand, so nothing is checked"
        )
    return idle
