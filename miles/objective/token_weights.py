"""Weigh the losses of tokens: corrections for samples that another policy generated, and the most uncertain tokens.

Engine and trainer compute the same model with other kernels, precision, or weights a few steps old, so their log-probs
differ; a correction weighs a token by their ratio, or drops it (docs/off-policy.md). ``TopEntropy`` corrects nothing:
it drops the tokens that the policy is sure of. Weights change the **numerator** of the loss alone, and every
denominator still counts the original masks (docs/loss-aggregation.md). They compose: the weight of a token is the
product of all that are on, in the order of ``TOKEN_WEIGHTS``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from miles.base.flags import Errors, flag_name
from miles.objective.hooks import custom_importance_weights
from miles.objective.kl import masked_log_ratio
from miles.objective.registry import Needs, Term
from miles.objective.sequences import sequence_means, sequence_sums

if TYPE_CHECKING:
    import numpy as np
    import torch

    from miles.objective.settings import TokenWeightFlags
    from miles.types.train_batch import MicroBatch

ImportanceLevel = Literal["token", "sequence", "geometric"]
_LEVELS: dict[ImportanceLevel, str] = {
    "token": "token",
    "sequence": "sequence (product)",
    "geometric": "sequence (geometric mean)",
}
_FARTHEST = 80.0  # logarithm of the largest ratio of a sequence; its exponential is a number in fp32
_SMALLEST_MEAN = 1e-8  # weights of a smaller mean are as good as 0, and not divided by it


@dataclass(frozen=True)
class Ratios:
    """The two ratios that token weights read, as logarithms [R] without a graph; 0 for masked tokens.

    Attributes:
        importance: log trainer - log engine. The trainer's are from before the first step of the iteration, or with
            ``--use-rollout-logprobs`` the current policy's, because the others are not computed.
        policy: log current - log old, which are the engine's with ``--use-rollout-logprobs``.
        trainer_log_probs: log trainer itself; masked tokens may hold anything.
        micro: The micro-batch.
    """

    importance: torch.Tensor
    policy: torch.Tensor
    trainer_log_probs: torch.Tensor
    micro: MicroBatch


class Weights(NamedTuple):
    """Weights of the token losses, fp32 [R] without a graph, and values [R] per token to be averaged and logged."""

    weights: torch.Tensor
    logged: dict[str, torch.Tensor]


class TokenWeight(ABC):
    """A factor of a token's loss.

    Attributes:
        switch: The flag that turns it on.
        reads: The other flags that it reads.
    """

    switch: ClassVar[str]
    reads: ClassVar[tuple[str, ...]]

    def is_on(self, loss: TokenWeightFlags) -> bool:
        """Return whether the run uses it."""
        return bool(getattr(loss, self.switch))

    def needs(self, loss: TokenWeightFlags) -> Needs:
        """Return the quantities that the trainer scores for it."""
        return Needs()

    def check(self, loss: TokenWeightFlags, errors: Errors) -> None:  # noqa: B027
        """Report the rules that ``loss`` breaks."""

    @abstractmethod
    def formula(self, loss: TokenWeightFlags) -> list[Term]:
        """Return what multiplies a token's loss."""

    @abstractmethod
    def weigh(self, loss: TokenWeightFlags, ratios: Ratios) -> Weights:
        """Compute the weights of all tokens of a micro-batch."""


class Truncation(TokenWeight):
    """Truncated importance sampling: the ratio trainer / engine, within [tis_clip_low, tis_clip].

    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training". IcePop (arXiv 2510.18855
    §4) is 0 outside instead. ``--custom-tis-function-path`` replaces these weights by others.
    """

    switch = "use_tis"
    reads = ("tis_clip", "tis_clip_low", "tis_mode", "tis_level", "tis_batch_normalize", "custom_tis_function_path")

    def needs(self, loss: TokenWeightFlags) -> Needs:
        """Ask for the old log-probs of every step: the mean of a step's weights is known before the step is taken."""
        return Needs(old_log_probs=loss.tis_batch_normalize)

    def check(self, loss: TokenWeightFlags, errors: Errors) -> None:
        """Check the order of the bounds."""
        _check_order(loss, "tis_clip_low", "tis_clip", errors)
        _refuse_engines_old_log_probs(self, loss, errors)

    def formula(self, loss: TokenWeightFlags) -> list[Term]:
        """Return the bounded ratio, or the user's function."""
        if loss.custom_tis_function_path is not None:
            path = loss.custom_tis_function_path
            return [Term(f"w = {path}(p_old, p_engine)", __name__, path)]
        low, high = loss.tis_clip_low, loss.tis_clip
        weight = {
            "truncate": f"clip(r, {low:g}, {high:g})",
            "icepop": f"r, or 0 outside [{low:g}, {high:g}]",
        }[loss.tis_mode]
        terms = [Term(f"w = {weight}, r = p_old / p_engine of the {_LEVELS[loss.tis_level]}", __name__)]
        if loss.tis_batch_normalize:
            what = "loss tokens" if loss.tis_level == "token" else "sequences"
            terms.append(Term(f"w is divided by its mean over the {what} of the step", __name__))
        return terms

    def weigh(self, loss: TokenWeightFlags, ratios: Ratios) -> Weights:
        """Bound the ratios; ``tis`` and ``tis_clipfrac`` are logged."""
        if loss.custom_tis_function_path is not None:
            weights = custom_importance_weights(loss.custom_tis_function_path, loss, ratios)
            return Weights(weights, {"tis": weights})
        weights, outside = bounded(loss, importance_ratio(ratios, loss.tis_level))
        if loss.tis_batch_normalize:
            assert ratios.micro.tis_mean is not None, "the trainer computes it before each step"
            weights = weights / ratios.micro.tis_mean
        return Weights(weights, {"tis": weights, "tis_clipfrac": outside.float()})


def bounded(loss: TokenWeightFlags, ratio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of ratios as ``--tis-mode`` bounds them, and whether each ratio is out of its bounds."""
    outside = (ratio < loss.tis_clip_low) | (ratio > loss.tis_clip)
    if loss.tis_mode == "truncate":
        return ratio.clamp(loss.tis_clip_low, loss.tis_clip), outside
    if loss.tis_mode == "icepop":
        return ratio.masked_fill(outside, 0.0), outside
    raise ValueError(f"--tis-mode {loss.tis_mode}: no such mode; give truncate or icepop")


class WeightSum(NamedTuple):
    """The sum of the weights of ``--use-tis``, and how many there are: loss tokens, or sequences."""

    total: float
    number: int


def sum_of_weights(loss: TokenWeightFlags, log_ratio: torch.Tensor) -> WeightSum:
    """Return the sum of the weights of one sample, and their number: one per loss token, or 1 for its sequence.

    Args:
        loss: The flags; ``Truncation`` has the same weights.
        log_ratio: log old - log engine of its loss tokens, [loss tokens].
    """
    if not len(log_ratio):
        return WeightSum(0.0, 0)
    if loss.tis_level == "sequence":
        log_ratio = log_ratio.sum().clamp(-_FARTHEST, _FARTHEST)[None]
    elif loss.tis_level == "geometric":
        log_ratio = log_ratio.mean().clamp(-_FARTHEST, _FARTHEST)[None]
    elif loss.tis_level != "token":
        raise _unknown_level(loss.tis_level)
    weights, _ = bounded(loss, log_ratio.exp())
    return WeightSum(weights.double().sum().item(), len(weights))


def mean_weight(sums: Iterable[WeightSum]) -> float:
    """Return the mean that divides the weights of a step; 1 if all are 0, or there are none."""
    sums = list(sums)
    mean = math.fsum(part.total for part in sums) / max(sum(part.number for part in sums), 1)
    return mean if mean > _SMALLEST_MEAN else 1.0


class Rejection(TokenWeight):
    """Masked importance sampling: drop tokens or sequences whose ratio is outside [rs_lower_bound, rs_upper_bound].

    ``--rs-veto-threshold`` also drops each sequence with a token whose own ratio is below it, whatever the level is.
    """

    switch = "use_rs"
    reads = ("rs_lower_bound", "rs_upper_bound", "rs_level", "rs_veto_threshold")

    def check(self, loss: TokenWeightFlags, errors: Errors) -> None:
        """Check the order of the bounds."""
        _check_order(loss, "rs_lower_bound", "rs_upper_bound", errors)
        _refuse_engines_old_log_probs(self, loss, errors)

    def formula(self, loss: TokenWeightFlags) -> list[Term]:
        """Name the tokens whose weight is 0."""
        bounds = f"[{loss.rs_lower_bound:g}, {loss.rs_upper_bound:g}]"
        terms = [Term(f"w = 0 where p_old / p_engine of the {_LEVELS[loss.rs_level]} is outside {bounds}", __name__)]
        if loss.rs_veto_threshold is not None:
            text = f"w = 0 in sequences with a token of p_old / p_engine below {loss.rs_veto_threshold:g}"
            terms.append(Term(text, __name__))
        return terms

    def weigh(self, loss: TokenWeightFlags, ratios: Ratios) -> Weights:
        """Give weight 0 to rejected tokens; ``rs_rejected`` is logged, and ``rs_vetoed`` with a veto."""
        ratio = importance_ratio(ratios, loss.rs_level)
        rejected = ((ratio < loss.rs_lower_bound) | (ratio > loss.rs_upper_bound)).float()
        logged = {"rs_rejected": rejected}
        if loss.rs_veto_threshold is not None:
            far = (ratios.importance < math.log(loss.rs_veto_threshold)).float() * ratios.micro.loss_mask
            vetoed = (sequence_sums(far, ratios.micro) > 0).float()[ratios.micro.sample_index]
            rejected = rejected.maximum(vetoed)
            logged = {"rs_rejected": rejected, "rs_vetoed": vetoed}
        return Weights(1.0 - rejected, logged)


class OffPolicyMasking(TokenWeight):
    """Drop sequences of negative advantage that the policy has moved away from (DeepSeek-V3.2, arXiv 2512.02556 §3.1).

    Such a sequence has a mean of log old - log current over its tokens above ``--opsm-delta``; old is the trainer's.
    """

    switch = "use_opsm"
    reads = ("opsm_delta",)

    def formula(self, loss: TokenWeightFlags) -> list[Term]:
        """Name the tokens whose weight is 0."""
        text = f"w = 0 in sequences with A < 0 and a mean of log p_old - log p above {loss.opsm_delta:g}"
        return [Term(text, __name__)]

    def weigh(self, loss: TokenWeightFlags, ratios: Ratios) -> Weights:
        """Give weight 0 to the tokens of dropped sequences; ``opsm_clipfrac`` is logged."""
        micro = ratios.micro
        divergence = sequence_means(-ratios.policy, micro)[micro.sample_index]
        dropped = ((micro.advantages < 0) & (divergence > loss.opsm_delta)).float()
        return Weights(1.0 - dropped, {"opsm_clipfrac": dropped})


class TopEntropy(TokenWeight):
    """Keep the loss of the fraction of the step's tokens where the policy is most uncertain (arXiv 2506.01939).

    A token counts if its entropy is at least the (1 - fraction) quantile over the loss tokens of the whole step, or
    equals it up to rounding. The policy is scored once more before each step for it. As for the corrections,
    denominators still count all tokens, as in the paper and in TRL, whose name the flag has.
    """

    switch = "top_entropy_quantile"
    reads = ()

    def is_on(self, loss: TokenWeightFlags) -> bool:
        """Return whether any token is left out."""
        return loss.top_entropy_quantile != 1

    def formula(self, loss: TokenWeightFlags) -> list[Term]:
        """Name the tokens whose weight is 0."""
        share = f"{100 * loss.top_entropy_quantile:g} %"
        return [Term(f"w = 0 except in the {share} of the step's tokens with the largest entropy", __name__)]

    def weigh(self, loss: TokenWeightFlags, ratios: Ratios) -> Weights:
        """Give weight 0 to the other tokens; ``top_entropy_tokens``, the fraction that is kept, is logged."""
        mask = ratios.micro.top_entropy
        assert mask is not None, "the trainer chooses these tokens before each step"
        return Weights(mask, {"top_entropy_tokens": mask})


def top_entropy_tokens(entropies: np.ndarray, fraction: float) -> np.ndarray:
    """Return which of a step's loss tokens have an entropy of at least the ``1 - fraction`` quantile, bool [T].

    Those that equal it up to rounding all count.

    >>> import numpy as np
    >>> top_entropy_tokens(np.array([0.1, 0.4, 0.2, 0.3, 0.0]), 0.4).tolist()
    [False, True, False, True, False]
    """
    import numpy as np

    from miles.objective.rounding import SCORES

    bound = np.quantile(entropies, 1.0 - fraction) - SCORES if len(entropies) else 0.0
    mask: np.ndarray = entropies >= bound
    return mask


TOKEN_WEIGHTS: tuple[TokenWeight, ...] = (Truncation(), Rejection(), OffPolicyMasking(), TopEntropy())
SWITCHES = tuple(weight.switch for weight in TOKEN_WEIGHTS)


def token_weights_of(loss: TokenWeightFlags) -> tuple[TokenWeight, ...]:
    """Return the token weights that the run uses, in their fixed order."""
    return tuple(weight for weight in TOKEN_WEIGHTS if weight.is_on(loss))


def check_token_weights(loss: TokenWeightFlags, errors: Errors) -> None:
    """Report the rules of all token weights that ``loss`` breaks."""
    for weight in TOKEN_WEIGHTS:
        weight.check(loss, errors)


def token_weights_formula(loss: TokenWeightFlags) -> list[Term]:
    """Return what multiplies a token's loss."""
    return [term for weight in token_weights_of(loss) for term in weight.formula(loss)]


def weigh(token_weights: Sequence[TokenWeight], loss: TokenWeightFlags, ratios: Ratios) -> Weights:
    """Multiply the weights of ``token_weights``."""
    weights = ratios.importance.new_ones(ratios.importance.shape)
    logged: dict[str, torch.Tensor] = {}
    for token_weight in token_weights:
        weighed = token_weight.weigh(loss, ratios)
        weights = weights * weighed.weights
        logged |= weighed.logged
    return Weights(weights, logged)


def mismatch(loss: TokenWeightFlags, ratios: Ratios) -> dict[str, torch.Tensor]:
    """Measure how far the trainer is from the engine, per token [R], on the original masks.

    ``is_ratio``, its square and ``is_ratio_weight`` are always there: ``ess_ratio`` is made of their means. With
    ``--get-mismatch-metrics`` also estimates of KL(engine || trainer) (k1, k3), chi-square, and both log-perplexities.
    """
    log_ratio = ratios.importance
    ratio = log_ratio.clamp(-40.0, 40.0).exp()  # its square is a number too
    values = {"is_ratio": ratio, "is_ratio_square": ratio.square(), "is_ratio_weight": ratio.new_ones(ratio.shape)}
    if loss.get_mismatch_metrics:
        values |= {
            "mismatch_kl": -log_ratio,
            "mismatch_k3_kl": log_ratio.expm1() - log_ratio,
            "mismatch_chi2": ratio.square() - 1.0,
            "train_log_ppl": -ratios.trainer_log_probs,
            "rollout_log_ppl": -ratios.micro.rollout_log_probs,
        }
    return values


def ratios_of(micro: MicroBatch, log_ratio: torch.Tensor, trainer_log_probs: torch.Tensor) -> Ratios:
    """Compute both ratios, [R]. ``log_ratio`` is log current - log old, masked; the other is of ``Ratios``."""
    trainer_log_probs = trainer_log_probs.detach()
    importance = masked_log_ratio(trainer_log_probs, micro.rollout_log_probs, micro.loss_mask)
    return Ratios(importance, log_ratio.detach(), trainer_log_probs, micro)


def importance_ratio(ratios: Ratios, level: ImportanceLevel) -> torch.Tensor:
    """Return the ratio that weighs or drops each token: its own, or the ratio of its sequence; fp32 [R]."""
    log_ratio, micro = ratios.importance, ratios.micro
    if level == "token":
        return log_ratio.exp()
    if level == "sequence":
        of_sequence = sequence_sums(log_ratio, micro)
    elif level == "geometric":
        of_sequence = sequence_means(log_ratio, micro)
    else:
        raise _unknown_level(level)
    return of_sequence.clamp(-_FARTHEST, _FARTHEST).exp()[micro.sample_index]


def _unknown_level(level: str) -> ValueError:
    return ValueError(f"{level}: no such level of a ratio; give one of {', '.join(_LEVELS)}")


def _refuse_engines_old_log_probs(weight: TokenWeight, loss: TokenWeightFlags, errors: Errors) -> None:
    """Refuse a weight that compares the trainer before the first step with the engine, if it is not scored."""
    if weight.is_on(loss) and loss.use_rollout_logprobs:
        rule = (
            "compares the trainer's log-probs with the engine's, and with --use-rollout-logprobs p_old is the engine's"
        )
        errors.refuse(weight.switch, True, rule, "drop one of the two")


def _check_order(loss: TokenWeightFlags, low: str, high: str, errors: Errors) -> None:
    if getattr(loss, low) > getattr(loss, high):
        rule = f"is above {flag_name(high)} {getattr(loss, high):g}"
        errors.refuse(low, getattr(loss, low), rule, "give a lower bound that is below the upper")
