"""The policy gradient loss: clipped ratios, with an optional KL term and entropy bonus."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from miles.objective.aggregation import get_pg_loss_reducer, is_per_token
from miles.objective.corrections import importance_correction
from miles.objective.kl import approximate_kl
from miles.objective.log_ratio import masked_log_ratio
from miles.objective.output import LossOutput
from miles.objective.reducers import get_sum_of_sample_mean
from miles.objective.sequences import sequence_means
from miles.objective.settings import LossArguments
from miles.train_batch import MicroBatch


def compute_policy_loss(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token losses and whether each was clipped (0/1, without graph); all [R], fp32.

    ``log_ratio`` is log policy - log old policy. PPO's clip (arXiv 1707.06347) of the ratio to [1 - eps_clip,
    1 + eps_clip_high], the latter DAPO's clip-higher (2503.14476), ``eps_clip`` if None. With ``eps_clip_c`` (above 1)
    the loss of a negative advantage is at most ``-eps_clip_c * advantage``: dual clip (1912.09729 Eq. 5). The clip
    fraction counts PPO's clip, not the dual one.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    ratio = log_ratio.float().exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + high)
    losses = torch.maximum(unclipped, clipped)
    if eps_clip_c is not None:
        assert eps_clip_c > 1.0, f"--eps-clip-c {eps_clip_c} must be above 1"
        losses = torch.where(advantages < 0, torch.minimum(losses, -eps_clip_c * advantages), losses)
    return losses, (clipped > unclipped).float().detach()


def policy_loss_function(
    loss: LossArguments,
    micro: MicroBatch,
    log_probs: torch.Tensor,
    entropy: torch.Tensor | None,
    canary: torch.Tensor | None = None,
) -> LossOutput:
    """``pg_loss - entropy_coef * entropy + kl_loss_coef * kl`` of one micro-batch; ``log_probs``, ``entropy`` are [R].

    Only pg_loss follows ``--loss-aggregation`` (or the custom reducer); everything else keeps the sample mean, or the
    token mean under ``token_mean``, so that runs of different modes stay comparable. ``entropy`` may be None if its
    coefficient is 0; it is then not reported. ``canary`` is the scalar of objective/canary.py, worth 0.
    """
    reduce = get_sum_of_sample_mean(micro, is_per_token(loss))
    old_log_probs = log_probs.detach() if micro.old_log_probs is None else micro.old_log_probs
    log_ratio = masked_log_ratio(log_probs, old_log_probs, micro.loss_mask)
    token_losses, clipped = compute_policy_loss(
        _policy_log_ratio(loss, micro, log_ratio), micro.advantages, loss.eps_clip, loss.eps_clip_high, loss.eps_clip_c
    )
    correction = importance_correction(loss, micro, old_log_probs)
    token_losses = token_losses * correction.weights
    logged = dict(correction.values)
    if loss.use_opsm:
        logged["opsm_clipfrac"] = dropped = off_policy_sequences(loss, micro, log_ratio)
        token_losses = token_losses * (1.0 - dropped)
    if canary is not None:
        token_losses = token_losses + canary
    total = pg_loss = get_pg_loss_reducer(loss, micro)(token_losses)
    metrics = {
        "pg_loss": pg_loss,
        "pg_clipfrac": reduce(clipped),
        "ppo_kl": reduce(-log_ratio),
        "train_rollout_logprob_abs_diff": reduce((old_log_probs - micro.rollout_log_probs).abs()),
        **{name: reduce(values) for name, values in logged.items()},
    }
    if entropy is not None:
        metrics["entropy_loss"] = entropy_loss = reduce(entropy)
        if loss.entropy_coef:
            total = total - loss.entropy_coef * entropy_loss
    else:
        assert not loss.entropy_coef, "--entropy-coef needs the entropy"
    if loss.use_kl_loss:
        metrics["kl_loss"] = kl_loss = reduce(_token_kl(loss, micro, log_probs))
        if loss.kl_loss_coef:
            total = total + loss.kl_loss_coef * kl_loss
    metrics["loss"] = total
    return LossOutput(total, {name: value.detach() for name, value in metrics.items()})


def _policy_log_ratio(loss: LossArguments, micro: MicroBatch, log_ratio: torch.Tensor) -> torch.Tensor:
    """The log-ratio that is clipped, [R]: the token's own, or under ``gspo`` that of its sequence.

    GSPO (arXiv 2507.18071 Eq. 7): the geometric mean of the ratios of a sequence's tokens. Written as in its Eq. 13:
    the value is the sequence's and the gradient the token's own. That adds up to the same where the tokens of a
    sequence weigh alike, and needs no gradient from other ranks.
    """
    if loss.advantage_estimator != "gspo":
        return log_ratio
    return sequence_means(log_ratio, micro)[micro.sample_index] + (log_ratio - log_ratio.detach())


def off_policy_sequences(loss: LossArguments, micro: MicroBatch, log_ratio: torch.Tensor) -> torch.Tensor:
    """1 for tokens of sequences that ``--use-opsm`` drops, else 0; fp32 [R].

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556 §3.1): a negative advantage, and a mean of
    log old - log current over the sequence's tokens above ``--opsm-delta``; old is the trainer's own.
    """
    divergence = sequence_means(-log_ratio, micro)[micro.sample_index]
    return ((micro.advantages < 0) & (divergence > loss.opsm_delta)).float()


def _token_kl(loss: LossArguments, micro: MicroBatch, log_probs: torch.Tensor) -> torch.Tensor:
    """The KL to the reference model of each token [R]; without a graph if it is only measured."""
    assert micro.ref_log_probs is not None, "--use-kl-loss needs the reference model's log-probs in the batch"
    current = log_probs if loss.kl_loss_coef else log_probs.detach()
    return approximate_kl(masked_log_ratio(current, micro.ref_log_probs, micro.loss_mask), loss.kl_loss_type)


def samples_with_gradient(loss: LossArguments, rewards: Sequence[float]) -> list[bool]:
    """Which samples' losses can have a gradient, given the normalized ``rewards`` that become their advantages.

    A sample of advantage 0 has none, unless a KL, an entropy bonus or a custom reducer may give it one. Groups whose
    samples were all right or all wrong are such samples. Where tokens get advantages of their own, they come later.
    """
    only_policy_gradient = (
        loss.loss_type == "policy_loss"
        and not loss.estimates_by_token
        and loss.kl_loss_coef == 0.0
        and loss.entropy_coef == 0.0
        and loss.custom_pg_loss_reducer_function_path is None
    )
    return [reward != 0.0 or not only_policy_gradient for reward in rewards]
