"""Token advantages and the critic's loss, written literally from docs/recipes.md: whole samples, float64 sums."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from cases import TEMPERATURE, VALUE_HEAD, Case, rows_of, with_scores
from compare import norm_of, samples_of, wanted
from oracle import Aggregate, OracleSample, token_scores


@dataclass(frozen=True)
class ExpectedStep:
    """Gradients of policy and critic by parameter, and all metrics of the step."""

    gradients: dict[str, torch.Tensor]
    critic_gradients: dict[str, torch.Tensor]
    metrics: dict[str, float]


def token_values(model: Any, head: torch.Tensor, sample: OracleSample) -> torch.Tensor:
    """Return the value of the state before each response token, float64 [response]."""
    ids = torch.as_tensor(sample.tokens)
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0]
    return hidden[len(ids) - len(sample.mask) - 1 : len(ids) - 1] @ head[0]


def off_policy_with_values(case: Case, model: Any) -> Case:
    """Return ``case`` with old and reference log-probs and old values near the model's own."""
    head = torch.from_numpy(VALUE_HEAD).double()
    with torch.no_grad():
        scores = [token_scores(model, s.tokens, len(s.mask), TEMPERATURE)[0].tolist() for s in samples_of(case)]
        values = [token_values(model, head, s).tolist() for s in samples_of(case)] if case.loss.has_critic else None
    return with_scores(case, scores, values)


def expected_step(case: Case, model: Any) -> ExpectedStep:
    """Return the expected result of one step of ``case`` with token advantages."""
    loss, samples = case.loss, samples_of(case)
    head = torch.from_numpy(VALUE_HEAD).double().requires_grad_()
    model.zero_grad()
    values = [token_values(model, head, s) for s in samples] if loss.has_critic else []
    old = [v.detach() for v in values]
    if "values" in case.scores:
        old = [torch.tensor(v, dtype=torch.float32).double() for v in case.scores["values"]]
    raw, kl, returns = _estimates(case, model, samples, old)
    masks = [torch.as_tensor(s.mask).bool() for s in samples]
    metrics = {"advantages": _mean(raw, masks)}
    if loss.kl_coef:
        metrics["reward_kl"] = _mean(kl, masks)
    critic_gradients: dict[str, torch.Tensor] = {}
    if loss.has_critic:
        metrics |= _of_returns(returns, old, masks)
        metrics |= _critic_step(case, samples, values, old, returns)
        named = {name: p.grad for name, p in model.named_parameters() if name.startswith("model.")}
        critic_gradients = {**{n: g.clone() for n, g in named.items() if g is not None}, "value_head": head.grad}
        metrics["critic_grad_norm"] = norm_of(critic_gradients)
    advantages = _whitened(raw, masks) if loss.normalize_advantages else raw
    samples = [replace(s, advantage=a) for s, a in zip(samples, advantages, strict=True)]
    model.zero_grad()
    gradients, of_policy = wanted(case, model, samples)
    return ExpectedStep(gradients, critic_gradients, metrics | of_policy)


def _estimates(case: Case, model: Any, samples: Sequence[OracleSample], values: Sequence[torch.Tensor]) -> Any:
    """Return advantages before whitening, KL and returns, each float64 [response] per sample."""
    loss, rows = case.loss, rows_of(case)
    advantages = [torch.zeros(len(s.mask), dtype=torch.float64) for s in samples]
    kl = [_kl(case, model, s) for s in samples]
    returns = [a.clone() for a in advantages]
    for rollout in sorted({s.rollout for s in samples}):
        members = [i for i, s in enumerate(samples) if s.rollout == rollout]
        tokens = [(i, t) for i in members for t, is_used in enumerate(samples[i].mask) if is_used]
        reward = statistics.mean(rows[i].sample.reward or 0.0 for i in members)
        r = [-loss.kl_coef * float(kl[i][t]) for i, t in tokens]
        if tokens:
            r[-1] += reward
        v = [float(values[i][t]) if loss.has_critic else 0.0 for i, t in tokens] + [0.0]
        for n, (i, t) in enumerate(tokens):
            if loss.advantage_estimator == "ppo":
                steps = range(n, len(tokens))
                delta = [r[k] + loss.gamma * v[k + 1] - v[k] for k in steps]
                advantages[i][t] = sum(
                    (loss.gamma * loss.lambd) ** (k - n) * d for k, d in zip(steps, delta, strict=True)
                )
                returns[i][t] = advantages[i][t] + v[n]
            elif loss.advantage_estimator == "reinforce_plus_plus":
                advantages[i][t] = sum(loss.gamma ** (k - n) * r[k] for k in range(n, len(tokens)))
            else:
                own = _less_its_group(case, i) if "baseline" in loss.advantage_estimator else rows[i].advantage
                advantages[i][t] = own - loss.kl_coef * float(kl[i][t])
    return advantages, kl, returns


def _less_its_group(case: Case, place: int) -> float:
    rows = rows_of(case)
    group = {
        r.sample.trajectory_id: r.sample.reward for r in rows if r.sample.group_index == rows[place].sample.group_index
    }
    return (rows[place].sample.reward or 0.0) - statistics.mean(reward or 0.0 for reward in group.values())


def _kl(case: Case, model: Any, sample: OracleSample) -> torch.Tensor:
    """Return the k3 estimate of the KL of the old policy from the reference."""
    if not case.loss.kl_coef:
        return torch.zeros(len(sample.mask), dtype=torch.float64)
    assert case.loss.kl_loss_type == "k3" and sample.old_log_probs is not None and sample.ref_log_probs is not None
    away = torch.as_tensor(sample.ref_log_probs).double() - torch.as_tensor(sample.old_log_probs).double()
    return away.exp() - 1 - away


def _critic_step(case: Case, samples, values, old, returns) -> dict[str, float]:
    """Run backward through the value loss and return its metrics."""
    losses, clipped = [], []
    for v, o, g in zip(values, old, returns, strict=True):
        bounded = torch.minimum(torch.maximum(v, o - case.loss.value_clip), o + case.loss.value_clip)
        plain, other = (v - g) ** 2, (bounded - g) ** 2
        losses.append(torch.maximum(plain, other))
        clipped.append((other > plain).double())
    mode = "token_mean" if case.loss.loss_aggregation == "token_mean" else "sample_mean"
    aggregate = Aggregate(samples, None)
    total = aggregate(mode, losses)
    total.backward()
    return {"value_loss": float(total.detach()), "value_clipfrac": float(aggregate(mode, clipped))}


def _of_returns(returns, values, masks) -> dict[str, float]:
    target, predicted = _chosen(returns, masks), _chosen(values, masks)
    metrics = {"returns": statistics.mean(target), "values": statistics.mean(predicted)}
    error = [g - v for g, v in zip(target, predicted, strict=True)]
    return metrics | {"explained_variance": 1 - statistics.pvariance(error) / statistics.pvariance(target)}


def _whitened(columns, masks):
    chosen = _chosen(columns, masks)
    mean, spread = statistics.mean(chosen), statistics.variance(chosen)
    return [(c - mean) / (spread + 1e-8) ** 0.5 for c in columns]


def _chosen(columns, masks) -> list[float]:
    return torch.cat([c[m] for c, m in zip(columns, masks, strict=True)]).tolist()


def _mean(columns, masks) -> float:
    return statistics.mean(_chosen(columns, masks))
