"""Compute the policy loss of a micro-batch: ratio, token losses, their weights, reduction, then KL and entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from miles.objective.adaptive import adaptive_entropy_formula, adaptive_kl_formula
from miles.objective.aggregation import (
    aggregation_formula,
    get_default_pg_loss_reducer,
    get_pg_loss_reducer,
    get_sum_of_sample_mean,
    is_per_token,
)
from miles.objective.kl import approximate_kl, kl_formula, masked_log_ratio
from miles.objective.loss_types.base import LossType, Objective, advantage_terms
from miles.objective.output import LossOutput, PolicyScores, TokenValues
from miles.objective.policy_losses.base import PolicyTokens
from miles.objective.registry import Needs, Term
from miles.objective.sequences import count_once, gather_whole, whole_responses
from miles.objective.token_weights import mismatch, ratios_of, token_weights_formula, weigh

if TYPE_CHECKING:
    import torch

    from miles.objective.registry import StepShape
    from miles.objective.settings import LossArguments
    from miles.types.train_batch import MicroBatch


OLD_OF_ENGINE = "the engine's probability at the time of sampling (--use-rollout-logprobs)"


class PolicyGradientLoss(LossType):
    """Train the policy on the advantages of its samples."""

    name = "policy_loss"
    summary = "policy gradient"
    uses_policy_loss = True
    loss_mass_is_known = True

    def needs_of(self, objective: Objective) -> Needs:
        """Add the inputs of the policy loss."""
        needs = super().needs_of(objective) | objective.policy_loss.needs(objective.flags)
        for weight in objective.token_weights:
            needs |= weight.needs(objective.flags)
        return needs

    def zero_advantage_has_gradient(self, flags: LossArguments) -> bool:
        """Return false: ``Objective.zero_advantage_has_gradient`` asks its parts."""
        return False

    def terms(self, objective: Objective, shape: StepShape) -> list[Term]:
        """Return the sum, the mean, the loss of a token and its weights, KL and entropy, and the advantages."""
        flags = objective.flags
        summands = ["pg_loss"]
        if flags.adds_kl:
            summands.append(f"+ {flags.kl_loss_coef:g} KL_{flags.kl_loss_type}(policy, reference)")
        if flags.entropy_target is not None:
            summands.append("- c entropy")
        elif flags.entropy_coef:
            sign = "-" if flags.entropy_coef > 0 else "+"
            summands.append(f"{sign} {abs(flags.entropy_coef):g} entropy")
        whole = Term("loss = " + " ".join(summands), __name__)
        mean = aggregation_formula("pg_loss", flags, shape)
        adaptive = [*adaptive_kl_formula(flags), *adaptive_entropy_formula(flags)]
        others = [*kl_formula(flags), *_entropy_formula(flags), *adaptive, *advantage_terms(objective, shape)]
        return [whole, *mean, *_token_loss_formula(objective), *others]

    def words(self, objective: Objective) -> str:
        """Name the policy loss."""
        return f"the policy-gradient loss ({objective.policy_loss.summary})"

    def idle_on_policy(self, objective: Objective) -> list[str]:
        """Name what clips or drops by the ratio, unless that is to the engine's probability."""
        if objective.flags.use_rollout_logprobs:
            return []
        notes = objective.policy_loss.idle_on_policy(objective.flags)
        if objective.flags.use_opsm:
            notes = [*notes, "--use-opsm: one step per iteration, so no sequence is away from the old policy"]
        return notes

    def language_model_loss(self, objective: Objective, micro: MicroBatch, scores: PolicyScores) -> LossOutput:
        """Compute the policy loss of one micro-batch."""
        return policy_loss_function(objective, micro, *scores)


def _token_loss_formula(objective: Objective) -> list[Term]:
    """Return the loss of a token, and its weights."""
    weights = token_weights_formula(objective.flags)
    first, *rest = objective.policy_loss.formula(objective.flags)
    text = first.text
    if weights:
        text = f"w ({text})" if text.startswith("-") else f"w {text}"
    old = [Term(f"p_old is {OLD_OF_ENGINE}", "miles.training.scoring")] if objective.flags.use_rollout_logprobs else []
    return [replace(first, text=f"l_it = {text}"), *rest, *old, *weights]


def _entropy_formula(loss: LossArguments) -> list[Term]:
    text = "entropy = -Σ p log p over the vocabulary, of each token"
    has_entropy = loss.entropy_coef or loss.entropy_target is not None
    return [Term(text, "miles.objective.token_log_probs")] if has_entropy else []


def policy_loss_function(
    objective: Objective,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    canary: torch.Tensor | None = None,
) -> LossOutput:
    """Compute ``pg_loss - entropy_coef * entropy + kl_loss_coef * kl`` of one micro-batch.

    Only pg_loss follows ``--loss-aggregation`` (or the custom reducer); everything else keeps the sample mean, or the
    token mean under ``token_mean``, so that runs of different modes stay comparable.

    Args:
        objective: The run's objective.
        micro: The micro-batch.
        log_probs: Log-probs of the current policy, [R], with a graph.
        entropy: Its entropy, [R]. None if it is not known: it is then not reported, and its coefficient must be 0.
        canary: The scalar 0 of canary.py, if the step is watched.
    """
    if objective.policy_loss.sees_whole_samples and micro.context.size > 1:
        return _evaluated_whole(objective, micro, log_probs, entropy, canary)
    loss = objective.flags
    reduce = get_sum_of_sample_mean(micro, is_per_token(loss))
    old_log_probs = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
    log_ratio = masked_log_ratio(log_probs, old_log_probs, micro.loss_mask)
    tokens = PolicyTokens(log_probs.float().masked_fill(micro.loss_mask == 0, 0.0), log_ratio, micro.advantages, micro)
    token_losses, clipped = objective.policy_loss.token_losses(loss, tokens)
    # With --use-rollout-logprobs the old log-probs are the engine's.
    trainer_log_probs = log_probs.detach() if loss.use_rollout_logprobs else old_log_probs
    ratios = ratios_of(micro, log_ratio, trainer_log_probs)
    weights, logged = weigh(objective.token_weights, loss, ratios)
    token_losses = token_losses * weights
    logged |= mismatch(loss, ratios)
    if clipped is not None:
        logged["pg_clipfrac"] = clipped
    if canary is not None:
        token_losses = token_losses + canary
    total = pg_loss = get_pg_loss_reducer(loss, micro)(token_losses)
    metrics = {
        "pg_loss": pg_loss,
        "ppo_kl": reduce(-log_ratio),
        "train_rollout_logprob_abs_diff": reduce((trainer_log_probs - micro.rollout_log_probs).abs()),
        **{name: reduce(values) for name, values in logged.items()},
    }
    if entropy is not None:
        metrics["entropy_loss"] = entropy_loss = reduce(entropy)
        if loss.entropy_coef:
            total = total - loss.entropy_coef * entropy_loss
    else:
        assert not loss.entropy_coef, "--entropy-coef needs the entropy"
    if loss.use_kl_loss:
        metrics["kl_loss"] = kl_loss = reduce(_token_kl(loss, micro, log_probs, log_ratio))
        if loss.kl_loss_coef:
            total = total + loss.kl_loss_coef * kl_loss
    metrics["loss"] = total
    values = TokenValues(micro, ratios.trainer_log_probs, ratios.policy, weights)
    return LossOutput(total, {name: value.detach() for name, value in metrics.items()}, values)


def _evaluated_whole(
    objective: Objective,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    canary: torch.Tensor | None,
) -> LossOutput:
    """Compute the loss of whole samples on every rank that shares them, and count it once.

    Each rank has the gradient of its log-probs alone, so the gradients add up to the whole. The canary is added to this
    rank's tokens alone, because it has the same gradient on every rank.
    """
    whole = gather_whole(micro)
    whole_entropy = None if entropy is None else whole_responses(entropy, micro)
    output = policy_loss_function(objective, whole, whole_responses(log_probs, micro), whole_entropy)
    total = count_once(output.loss, micro)
    if canary is not None:
        total = total + get_default_pg_loss_reducer(objective.flags, micro)(canary.expand(micro.loss_mask.shape))
    return LossOutput(total, {name: count_once(value, micro) for name, value in output.metrics.items()}, output.tokens)


def _token_kl(loss: LossArguments, micro: MicroBatch, log_probs: torch.Tensor, log_ratio: torch.Tensor) -> torch.Tensor:
    """Compute the KL to the reference model of each token [R]; without a graph if it is only measured."""
    assert micro.ref_log_probs is not None, "--use-kl-loss needs the reference model's log-probs in the batch"
    current = log_probs if loss.kl_loss_coef else log_probs.detach()
    kl = approximate_kl(masked_log_ratio(current, micro.ref_log_probs, micro.loss_mask), loss.kl_loss_type)
    return log_ratio.exp() * kl if loss.use_unbiased_kl else kl
