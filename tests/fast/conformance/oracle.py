"""The objective, written literally from docs/loss-aggregation.md: whole samples, plain transformers, float64.

It follows the table there, not the code: sums and means over whole samples, without packing, weights or ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from miles.objective.settings import LossArguments


@dataclass(frozen=True)
class OracleSample:
    """One sample as the objective sees it: tokens, response mask, trajectory and group, and advantage."""

    tokens: Sequence[int]
    mask: Sequence[int]
    rollout: int
    group: int
    advantage: Any  # one number, or float64 [response]
    rollout_log_probs: Sequence[float]
    old_log_probs: Sequence[float] | None = None
    ref_log_probs: Sequence[float] | None = None
    support: Sequence[Any] | None = None  # the tokens that each was drawn from; None: all
    experts: Any = None  # [tokens - 1, layers, k]; None: the routers' own
    images: Any = None  # the arguments of transformers' model for its images


def load_oracle(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="sdpa").train()


def token_scores(
    model,
    tokens: Sequence[int],
    response: int,
    temperature: float,
    support: Sequence[Any] | None = None,
    experts: Any = None,
    images: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies of the last ``response`` of ``tokens``, each [response]."""
    ids = torch.as_tensor(tokens)
    with given_experts(model, experts):
        logits = model(input_ids=ids[None], **(images or {})).logits[0] / temperature
    logits = logits[len(ids) - response - 1 : len(ids) - 1]
    if support is not None:
        return _restricted_scores(logits, ids[len(ids) - response :].tolist(), support)
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, ids[len(ids) - response :, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@contextmanager
def given_experts(model, experts: Any) -> Iterator[None]:
    """Have the routers take ``experts`` for all tokens but the last, if they are given."""

    def use(layer: int) -> Any:
        def choose(router, _, output):
            logits, own = output[0].double(), output[2]
            chosen = torch.cat([torch.as_tensor(experts[:, layer]).long(), own[-1:]])
            values = logits.gather(1, chosen)
            if hasattr(router, "e_score_correction_bias"):  # DeepSeek-V3 (arXiv 2412.19437) eq. 13 to 15
                scores = 1 / (1 + (-values).exp())
                scale = router.routed_scaling_factor / (scores.sum(1, keepdim=True) if router.norm_topk_prob else 1)
                return output[0], scores * scale, chosen
            over = values if router.norm_topk_prob else logits
            return output[0], values.exp() / over.exp().sum(1, keepdim=True), chosen

        return choose

    gates = [] if experts is None else routers_of(model)
    hooks = [gate.register_forward_hook(use(layer)) for layer, gate in gates]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def routers_of(model) -> list[tuple[int, Any]]:
    layers = enumerate(model.model.layers)
    return [(number, layer.mlp.gate) for number, layer in layers if hasattr(layer.mlp, "gate")]


def chosen_experts(model, tokens: Sequence[int]) -> torch.Tensor:
    """Return the experts that the routers choose for all tokens but the last, [tokens - 1, layers, k]."""
    by_layer: dict[int, torch.Tensor] = {}
    hooks = [
        gate.register_forward_hook(lambda _, __, output, n=layer: by_layer.update({n: output[2][:-1]}))
        for layer, gate in routers_of(model)
    ]
    with torch.no_grad():
        model(input_ids=torch.as_tensor(tokens)[None])
    for hook in hooks:
        hook.remove()
    some = next(iter(by_layer.values()))
    return torch.stack([by_layer.get(n, torch.zeros_like(some)) for n in range(len(model.model.layers))], 1)


def _restricted_scores(logits, tokens: Sequence[int], support: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both over each token's own set, whose logits alone are in the softmax."""
    log_probs, entropies = [], []
    for row, token, token_set in zip(logits, tokens, support, strict=True):
        members = list(range(len(row))) if token_set is None else list(token_set)
        log_p = row[members].log_softmax(-1)
        log_probs.append(log_p[members.index(token)])
        entropies.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropies)


@dataclass(frozen=True)
class Aggregate:
    """The modes: mean over trajectories, over prompts, over tokens, division by a constant, and weights by length."""

    samples: Sequence[OracleSample]
    divisor: float | None
    alpha: float | None = None

    def __call__(self, mode: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
        masks = [torch.as_tensor(s.mask).double() for s in self.samples]
        sums = [(v.masked_fill(m == 0, 0.0)).sum() for m, v in zip(masks, values, strict=True)]
        counts = [float(m.sum()) for m in masks]
        if mode == "sample_mean":
            return self._mean_of_means([s.rollout for s in self.samples], sums, counts)
        if mode == "prompt_mean":
            return self._mean_of_means([s.group for s in self.samples], sums, counts)
        if mode == "token_mean":
            return sum(sums) / max(sum(counts), 1.0)
        if mode == "delta_l":
            return self._weighted_by_length(sums, counts)
        return sum(sums) / (self.divisor * len({s.rollout for s in self.samples}))

    def _weighted_by_length(self, sums: Sequence[torch.Tensor], counts: Sequence[float]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        groups = {s.group for s in self.samples}
        for group in groups:
            lengths = {s.rollout: 0.0 for s in self.samples if s.group == group}
            for sample, count in zip(self.samples, counts, strict=True):
                if sample.group == group:
                    lengths[sample.rollout] += count
            powers = {rollout: length**-self.alpha for rollout, length in lengths.items() if length}
            for sample, value in zip(self.samples, sums, strict=True):
                if sample.rollout in powers:
                    total = total + powers[sample.rollout] / sum(powers.values()) * value
        return total / (self.divisor * len(groups))

    @staticmethod
    def _mean_of_means(keys: Sequence[int], sums: Sequence[torch.Tensor], counts: Sequence[float]) -> torch.Tensor:
        means = []
        for key in sorted(set(keys)):
            members = [i for i, k in enumerate(keys) if k == key]
            means.append(sum(sums[i] for i in members) / max(sum(counts[i] for i in members), 1.0))
        return sum(means) / len(means)


def scores_of(model, samples: Sequence[OracleSample], temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return log-probs and entropies of each sample's response, with their graph."""
    return [token_scores(model, s.tokens, len(s.mask), temperature, s.support, s.experts, s.images) for s in samples]


def objective(
    scored: Sequence[tuple[torch.Tensor, torch.Tensor]], samples: Sequence[OracleSample], loss: LossArguments
) -> dict[str, torch.Tensor]:
    """Return every metric of a step by name, from ``scores_of`` its samples; ``loss`` is the quantity to minimize."""
    aggregate = Aggregate(samples, loss.loss_aggregation_divisor, loss.loss_aggregation_alpha)
    log_probs, entropy = [s[0] for s in scored], [s[1] for s in scored]
    if loss.loss_type == "sft_loss":
        return {"loss": aggregate(loss.loss_aggregation, [-p for p in log_probs])}
    diagnostic = "token_mean" if loss.loss_aggregation == "token_mean" else "sample_mean"

    def mean(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return aggregate(diagnostic, values)

    engine = [torch.as_tensor(s.rollout_log_probs).double() for s in samples]
    old = [
        p.detach() if s.old_log_probs is None else torch.as_tensor(s.old_log_probs).double()
        for s, p in zip(samples, log_probs, strict=True)
    ]
    trainer = old
    if loss.use_rollout_logprobs:
        old, trainer = engine, [p.detach() for p in log_probs]
    losses, clipped, dropped = _policy_losses(loss, samples, log_probs, old)
    if loss.policy_loss in ("clip_cov", "kl_cov"):
        losses, clipped = _losses_by_covariance(loss, samples, log_probs, old, losses, clipped)
    weights, values, means = _weights(loss, samples, trainer, engine)
    metrics = means | {name: mean(columns) for name, columns in values.items()}
    if loss.use_opsm:
        metrics["opsm_clipfrac"] = mean(dropped)
        weights = [w * (1 - d) for w, d in zip(weights, dropped, strict=True)]
    if loss.top_entropy_quantile != 1:
        masks = [torch.as_tensor(s.mask) != 0 for s in samples]
        of_step = torch.cat([h.detach()[m] for h, m in zip(entropy, masks, strict=True)])
        bound = of_step.quantile(1 - loss.top_entropy_quantile) - 1e-5 if len(of_step) else 0.0
        selection = [(h.detach() >= bound).double() for h in entropy]
        metrics["top_entropy_tokens"] = mean(selection)
        weights = [w * k for w, k in zip(weights, selection, strict=True)]
    ratios = [(o - e).exp() for o, e in zip(trainer, engine, strict=True)]
    metrics |= {
        "pg_loss": aggregate(loss.loss_aggregation, [x * w for x, w in zip(losses, weights, strict=True)]),
        **({} if clipped is None else {"pg_clipfrac": mean(clipped)}),
        "ppo_kl": mean([o - p for o, p in zip(old, log_probs, strict=True)]),
        "entropy_loss": mean(entropy),
        "train_rollout_logprob_abs_diff": mean([(o - e).abs() for o, e in zip(trainer, engine, strict=True)]),
        "is_ratio": mean(ratios),
        "ess_ratio": _ess_ratio(mean(ratios), mean([r**2 for r in ratios]), mean([torch.ones_like(r) for r in ratios])),
    }
    total = metrics["pg_loss"] - loss.entropy_coef * metrics["entropy_loss"]
    if loss.use_kl_loss:
        assert loss.kl_loss_type == "k3"
        away = [torch.as_tensor(s.ref_log_probs).double() - p for s, p in zip(samples, log_probs, strict=True)]
        weights = [(p - o).exp() if loss.use_unbiased_kl else 1.0 for p, o in zip(log_probs, old, strict=True)]
        metrics["kl_loss"] = mean([w * (d.exp() - 1 - d) for d, w in zip(away, weights, strict=True)])
        total = total + loss.kl_loss_coef * metrics["kl_loss"]
    return metrics | {"loss": total}


def _ess_ratio(mean: torch.Tensor, mean_of_squares: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """(sum w)^2 / (n sum w^2); the means count trajectories without a loss token, all but a ``share`` of them."""
    return (mean / share) ** 2 / (mean_of_squares / share) if share else share


def _policy_losses(loss: LossArguments, samples, log_probs, old):
    """Return, per sample, three tensors over tokens: clipped losses, whether clipped, and whether OPSM drops them."""
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    losses, clipped, dropped = [], [], []
    for sample, p, o in zip(samples, log_probs, old, strict=True):
        mask = torch.as_tensor(sample.mask).double()
        mean_log_ratio = ((p - o) * mask).sum() / mask.sum().clamp(min=1)
        of_sequence = (loss.policy_loss or loss.advantage_estimator) == "gspo"
        log_ratio = mean_log_ratio.expand(len(p)) if of_sequence else p - o
        ratio = log_ratio.exp()
        plain, bounded = -sample.advantage * ratio, -sample.advantage * ratio.clamp(1 - loss.eps_clip, 1 + high)
        losses.append(torch.maximum(plain, bounded))
        clipped.append((bounded > plain).double())
        drop = loss.use_opsm and sample.advantage < 0 and -mean_log_ratio.item() > loss.opsm_delta
        dropped.append(torch.full((len(p),), float(drop), dtype=torch.float64))
    return losses, clipped, dropped


def _losses_by_covariance(loss: LossArguments, samples, log_probs, old, ppo_losses, ppo_clipped):
    """Return the losses of clip_cov, which must draw all tokens in its range, or kl_cov, and the clipped tokens."""
    flat = [
        (i, t, float(p), float(o), float(torch.as_tensor(s.advantage).expand(len(row))[t]))
        for i, (s, row, before) in enumerate(zip(samples, log_probs, old, strict=True))
        for t, (p, o) in enumerate(zip(row.detach(), before, strict=True))
        if s.mask[t]
    ]
    means = [sum(token[c] for token in flat) / len(flat) for c in (2, 4)]
    covariance = {(i, t): (p - means[0]) * (a - means[1]) for i, t, p, _, a in flat}
    chosen = [torch.zeros(len(p), dtype=torch.float64) for p in log_probs]
    if loss.policy_loss == "clip_cov":
        assert loss.clip_cov_fraction == 1
        for (i, t), c in covariance.items():
            chosen[i][t] = float(loss.clip_cov_min < c < loss.clip_cov_max and not ppo_clipped[i][t])
        return (
            [x * (1 - k) for x, k in zip(ppo_losses, chosen, strict=True)],
            [torch.maximum(x, k) for x, k in zip(ppo_clipped, chosen, strict=True)],
        )
    for i, t in sorted(covariance, key=covariance.__getitem__)[-max(1, int(loss.kl_cov_fraction * len(flat))) :]:
        chosen[i][t] = 1.0
    is_abs = loss.kl_cov_penalty == "abs"
    losses = [
        -s.advantage * (p - o).exp() + loss.kl_cov_coef * k * ((p - o).abs() if is_abs else (p - o).exp() - 1 - (p - o))
        for s, p, o, k in zip(samples, log_probs, old, chosen, strict=True)
    ]
    return losses, None


def _weights(loss: LossArguments, samples, old, engine):
    """Return the weight of every token loss, the metrics of the weights by token, and the metrics of the step."""
    weights, columns = [], {}
    mean, means = 1.0, {}
    if loss.tis_batch_normalize:
        bounded = [_truncated(loss, s, o, e)[0] for s, o, e in zip(samples, old, engine, strict=True)]
        loss_weights = [w[torch.as_tensor(s.mask) != 0] for s, w in zip(samples, bounded, strict=True)]
        if loss.tis_level != "token":
            loss_weights = [w[:1] for w in loss_weights]
        mean = torch.cat(loss_weights).mean() if sum(map(len, loss_weights)) else torch.ones(())
        means = {"tis_mean": mean}
    for sample, o, e in zip(samples, old, engine, strict=True):
        at = _ratios(sample, o, e)
        weight, logged = torch.ones_like(o), {}
        if loss.use_tis:
            weight, outside = _truncated(loss, sample, o, e)
            weight = weight / mean
            logged |= {"tis": weight, "tis_clipfrac": outside.double()}
        if loss.use_rs:
            ratio = at[loss.rs_level]
            rejected = (ratio < loss.rs_lower_bound) | (ratio > loss.rs_upper_bound)
            weight = torch.where(rejected, 0.0, weight)
            if loss.rs_veto_threshold is not None:
                far = any(r < loss.rs_veto_threshold for r, m in zip(at["token"], sample.mask, strict=True) if m)
                logged["rs_vetoed"] = torch.full((len(o),), float(far), dtype=torch.float64)
                weight = weight * (not far)
                rejected = rejected | far
            logged["rs_rejected"] = rejected.double()
        if loss.get_mismatch_metrics:
            ratio = at["token"]
            logged |= {
                "mismatch_kl": e - o,
                "mismatch_k3_kl": ratio - 1 - (o - e),
                "mismatch_chi2": ratio**2 - 1,
                "train_log_ppl": -o,
                "rollout_log_ppl": -e,
            }
        weights.append(weight)
        for name, values in logged.items():
            columns.setdefault(name, []).append(values)
    return weights, columns, means


def _ratios(sample: OracleSample, o: torch.Tensor, e: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the ratio of trainer to engine at every token, by level."""
    mask = torch.as_tensor(sample.mask).double()
    difference = (o - e) * mask
    return {
        "token": (o - e).exp(),
        "sequence": difference.sum().exp().expand(len(o)),
        "geometric": (difference.sum() / mask.sum().clamp(min=1)).exp().expand(len(o)),
    }


def _truncated(loss: LossArguments, sample: OracleSample, o, e) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bounded weights of --use-tis, and whether each ratio is out of bounds."""
    ratio = _ratios(sample, o, e)[loss.tis_level]
    outside = (ratio < loss.tis_clip_low) | (ratio > loss.tis_clip)
    cut = ratio.clamp(loss.tis_clip_low, loss.tis_clip)
    return (cut if loss.tis_mode == "truncate" else torch.where(outside, 0.0, ratio)), outside
