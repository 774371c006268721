"""Compare a result of the ranks with the oracle: every parameter's gradient, the norm, and every metric."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from cases import TEMPERATURE, Case, rows_of, with_scores
from oracle import OracleSample, objective, scores_of
from tolerance import METRIC_ERROR, RELATIVE_ERROR

OF_THE_RUN = ("lr", "critic_lr", "loss_mass", "skipped_steps")  # reported, but not part of the objective


_KNOWN: WeakKeyDictionary[Any, OrderedDict[Any, Any]] = WeakKeyDictionary()
_MOST_KNOWN = 64  # of a model; the layouts of one test have the same batches


def _once(model: Any, what: Any, compute: Callable[[], Any]) -> Any:
    """Return ``compute()``, or its earlier result for the same data ``what`` and the same weights."""
    known = _KNOWN.setdefault(model, OrderedDict())
    key = (tuple(parameter._version for parameter in model.parameters()), pickle.dumps(what))
    if key not in known:
        known[key] = compute()
        if len(known) > _MOST_KNOWN:
            known.popitem(last=False)
    return known[key]


def off_policy(case: Case, model: Any) -> Case:
    """Return ``case`` with old and reference log-probs near the model's own."""
    return with_scores(case, [log_probs.tolist() for log_probs, _ in _scores_of(model, samples_of(case))])


def _scores_of(model: Any, samples: Sequence[OracleSample]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ``scores_of`` samples, computed once."""
    what = "scores", [(s.tokens, len(s.mask), s.support, s.experts, s.images) for s in samples]
    return _once(model, what, lambda: scores_of(model, samples, TEMPERATURE))


def sets_of(sample: Any) -> list[Any] | None:
    return None if sample.support is None else sample.support.sets()


def images_of(sample: Any) -> dict[str, torch.Tensor] | None:
    if sample.prompt.images is None:
        return None
    made = sample.prompt.images.cache["tensors"]
    tensors = {name: torch.from_numpy(array) for name, array in made.tensors.items()}
    is_image = torch.tensor([sample.tokens]) == made.placeholder_id
    return tensors | {"pixel_values": tensors["pixel_values"].double(), "mm_token_type_ids": is_image.int()}


def samples_of(case: Case) -> list[OracleSample]:
    samples = []
    for row in rows_of(case):
        sample = row.sample
        assert sample.trajectory_id is not None and sample.rollout_log_probs is not None
        plain = OracleSample(
            sample.tokens, sample.loss_mask, sample.trajectory_id, sample.group_index, row.advantage,
            sample.rollout_log_probs, support=sets_of(sample), experts=sample.experts, images=images_of(sample),
        )  # fmt: skip
        if case.off_policy:
            plain = replace(
                plain, old_log_probs=case.scores["old"][row.place], ref_log_probs=case.scores["ref"][row.place]
            )
        samples.append(plain)
    return samples


def wanted(case: Case, model: Any, samples: Sequence[OracleSample]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the oracle's gradients by parameter and its metrics by name. They do not depend on the layout."""
    gradients, metrics = _once(model, (case.loss, list(samples)), lambda: _wanted(case, model, samples))
    return dict(gradients), dict(metrics)


def _wanted(
    case: Case, model: Any, samples: Sequence[OracleSample]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    model.zero_grad()
    metrics = objective(_scores_of(model, samples), samples, case.loss)
    total = metrics["loss"]
    if total.requires_grad:
        total.backward(retain_graph=True)  # the next loss of these samples has the same scores
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return gradients, {name: float(value.detach()) for name, value in metrics.items()}


def differences(result: Any, gradients: dict[str, torch.Tensor], metrics: dict[str, float]) -> list[str]:
    """Describe each difference from the oracle that fp32 does not explain; empty if there are none."""
    return distance(result, gradients, metrics)[1]


def distance(result: Any, gradients: dict[str, torch.Tensor], metrics: dict[str, float]) -> tuple[float, list[str]]:
    """Return the largest relative error of a parameter's gradient, and the ``differences``."""
    worst, messages = gradient_distance(result.gradients, gradients)
    reported = {name: value for name, value in result.metrics.items() if name not in OF_THE_RUN}
    skipped = "skipped_steps" in result.metrics
    expected = {} if skipped else metrics | {"grad_norm": norm_of(gradients)}
    messages += [f"{name}: not reported" for name in expected.keys() - reported.keys()]
    messages += [f"{name}: not known to the oracle" for name in reported.keys() - expected.keys()]
    for name in expected.keys() & reported.keys():
        if not abs(reported[name] - expected[name]) <= max(RELATIVE_ERROR * abs(expected[name]), METRIC_ERROR):
            messages.append(f"{name}: {reported[name]:.8g} for {expected[name]:.8g}")
    return worst, messages


def gradient_differences(result: dict[str, Any], gradients: dict[str, torch.Tensor]) -> list[str]:
    """Describe each gradient that differs from the oracle's by more than fp32 explains."""
    return gradient_distance(result, gradients)[1]


def gradient_distance(result: dict[str, Any], gradients: dict[str, torch.Tensor]) -> tuple[float, list[str]]:
    """Return ``distance`` for the gradients only."""
    assert result.keys() == gradients.keys()
    norm = norm_of(gradients) if gradients else 0.0
    messages, worst = [], 0.0
    for name, gradient in gradients.items():
        # A gradient much smaller than the whole may be the rounding error of larger ones.
        error = (torch.from_numpy(result[name]).double() - gradient).norm().item()
        scale = max(gradient.norm().item(), 0.05 * norm, 1e-7)
        worst = max(worst, error / scale)
        if not error <= RELATIVE_ERROR * scale:  # NaN counts as a difference
            messages.append(f"gradient of {name}: off by {error:.2e} of {gradient.norm().item():.2e}")
    return worst, messages


def norm_of(gradients: dict[str, torch.Tensor]) -> float:
    return torch.stack([g.norm() for g in gradients.values()]).norm().item()
