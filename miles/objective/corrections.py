"""Corrections for sampling from one policy (the engine's) and training another: weights of token losses, and rejection.

Engine and trainer compute the same model with other kernels, precision, or weights a few steps old, so their log-probs
differ. What is done about it stands in the **numerator** of the loss alone: a token's loss is weighted or dropped,
and every denominator stays that of the original masks (docs/loss-aggregation.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles.objective.log_ratio import masked_log_ratio
from miles.objective.sequences import sequence_means, sequence_sums
from miles.objective.settings import ImportanceLevel, LossArguments
from miles.train_batch import MicroBatch


@dataclass(frozen=True)
class Correction:
    """``weights`` fp32 [R] of the token losses, without a graph, and per-token values [R] to be averaged and logged."""

    weights: torch.Tensor
    values: dict[str, torch.Tensor]


def importance_correction(loss: LossArguments, micro: MicroBatch, old_log_probs: torch.Tensor) -> Correction:
    """What the flags ask for; ``old_log_probs`` [R] are the trainer's, before the first step of the rollout.

    Truncated importance sampling (``--use-tis``): the ratio trainer / engine, kept in [tis_clip_low, tis_clip] (Yao et
    al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"). IcePop (arXiv 2510.18855 §4)
    is 0 outside instead. Rejection (``--use-rs``, masked importance sampling) drops tokens or whole sequences whose
    ratio lies outside [rs_lower_bound, rs_upper_bound]. A sequence's ratio is the product of those of its unmasked
    tokens, or their geometric mean.
    """
    log_ratio = masked_log_ratio(old_log_probs.detach(), micro.rollout_log_probs, micro.loss_mask)
    weights = torch.ones_like(log_ratio)
    values: dict[str, torch.Tensor] = {}
    if loss.use_tis:
        ratio = _at_level(log_ratio, micro, loss.tis_level)
        outside = (ratio < loss.tis_clip_low) | (ratio > loss.tis_clip)
        bounded = ratio.clamp(loss.tis_clip_low, loss.tis_clip)
        weights = bounded if loss.tis_mode == "truncate" else ratio.masked_fill(outside, 0.0)
        values |= {"tis": weights, "tis_clipfrac": outside.float()}
    if loss.use_rs:
        ratio = _at_level(log_ratio, micro, loss.rs_level)
        rejected = (ratio < loss.rs_lower_bound) | (ratio > loss.rs_upper_bound)
        weights = weights.masked_fill(rejected, 0.0)
        values["rs_rejected"] = rejected.float()
    return Correction(weights, values | mismatch(loss, micro, log_ratio, old_log_probs.detach()))


def mismatch(
    loss: LossArguments, micro: MicroBatch, log_ratio: torch.Tensor, old_log_probs: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far the trainer is from the engine, per token [R], on the original masks.

    ``is_ratio`` and ``is_ratio_square`` are always there: ``ess_ratio`` is made of their means. With
    ``--get-mismatch-metrics`` also estimates of KL(engine || trainer) (k1, k3), chi-square, and both log-perplexities.
    """
    ratio = log_ratio.clamp(-40.0, 40.0).exp()  # its square is a number too
    values = {"is_ratio": ratio, "is_ratio_square": ratio.square()}
    if loss.get_mismatch_metrics:
        values |= {
            "mismatch_kl": -log_ratio,
            "mismatch_k3_kl": torch.expm1(log_ratio) - log_ratio,
            "mismatch_chi2": ratio.square() - 1.0,
            "train_log_ppl": -old_log_probs,
            "rollout_log_ppl": -micro.rollout_log_probs,
        }
    return values


def _at_level(log_ratio: torch.Tensor, micro: MicroBatch, level: ImportanceLevel) -> torch.Tensor:
    """The ratio that each token is judged by: its own, or that of its sequence; fp32 [R]."""
    if level == "token":
        return log_ratio.exp()
    of_sequence = sequence_sums(log_ratio, micro) if level == "sequence" else sequence_means(log_ratio, micro)
    return of_sequence.clamp(-80.0, 80.0).exp()[micro.sample_index]
