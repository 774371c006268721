"""The objective table read literally: whole unsplit samples, plain transformers, float64."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from miles.arguments.loss import LossArguments
from miles.train_batch import TrainBatch

DIVISOR = 8.0  # L of ``constant``


def load_oracle(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").train()


def token_scores(model, batch: TrainBatch, i: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the response tokens of sample ``i``, each [response]."""
    tokens = torch.as_tensor(batch.tokens[i])
    response = batch.response_lengths[i]
    logits = model(input_ids=tokens[None]).logits[0] / temperature
    log_p = logits[len(tokens) - response - 1 : len(tokens) - 1].log_softmax(-1)
    return log_p.gather(-1, tokens[len(tokens) - response :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def aggregate(mode: str, batch: TrainBatch, values: list[torch.Tensor]) -> torch.Tensor:
    """The four rows of the table in design order: a mean over rollouts, over prompts, over tokens, a constant."""
    masks = [torch.as_tensor(m).double() for m in batch.loss_masks]
    sums = [(m * v).sum() for m, v in zip(masks, values, strict=True)]
    counts = [m.sum() for m in masks]

    def mean_of_means(keys: list[int]) -> torch.Tensor:
        means = []
        for key in sorted(set(keys)):
            members = [i for i, k in enumerate(keys) if k == key]
            means.append(sum(sums[i] for i in members) / max(sum(counts[i] for i in members), 1))
        return sum(means) / len(means)

    if mode == "sample_mean":
        return mean_of_means(batch.rollout_ids)
    if mode == "prompt_mean":
        return mean_of_means(batch.group_indices)
    if mode == "token_mean":
        return sum(sums) / max(sum(counts), 1)
    return sum(sums) / (DIVISOR * len(set(batch.rollout_ids)))


def objective(model, batch: TrainBatch, loss: LossArguments, temperature: float) -> dict[str, torch.Tensor]:
    """Every reported metric of the step; ``loss`` is what is minimized."""
    log_probs, entropy = zip(*(token_scores(model, batch, i, temperature) for i in range(len(batch))), strict=True)
    old = [p.detach() for p in log_probs]
    if batch.old_log_probs is not None:
        old = [torch.as_tensor(x).double() for x in batch.old_log_probs]
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    ratios = [(p - o).exp() for p, o in zip(log_probs, old, strict=True)]
    bounded = [r.clamp(1 - loss.eps_clip, 1 + high) for r in ratios]
    losses = [torch.maximum(-a * r, -a * c) for a, r, c in zip(batch.rewards, ratios, bounded, strict=True)]
    clipped = [(-a * c > -a * r).double() for a, r, c in zip(batch.rewards, ratios, bounded, strict=True)]

    diagnostic = "token_mean" if loss.loss_aggregation == "token_mean" else "sample_mean"

    def mean(values: list[torch.Tensor]) -> torch.Tensor:
        return aggregate(diagnostic, batch, values)

    metrics = {
        "pg_loss": aggregate(loss.loss_aggregation, batch, losses),
        "pg_clipfrac": mean(clipped),
        "ppo_kl": mean([o - p for o, p in zip(old, log_probs, strict=True)]),
        "entropy_loss": mean(list(entropy)),
        "train_rollout_logprob_abs_diff": mean(
            [(o - torch.as_tensor(r)).abs() for o, r in zip(old, batch.rollout_log_probs, strict=True)]
        ),
    }
    total = metrics["pg_loss"] - loss.entropy_coef * metrics["entropy_loss"]
    if loss.use_kl_loss:
        assert batch.ref_log_probs is not None and loss.kl_loss_type == "k3"
        away = [torch.as_tensor(r).double() - p for r, p in zip(batch.ref_log_probs, log_probs, strict=True)]
        metrics["kl_loss"] = mean([d.exp() - 1 - d for d in away])
        total = total + loss.kl_loss_coef * metrics["kl_loss"]
    return metrics | {"loss": total}
