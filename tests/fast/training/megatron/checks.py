"""What must hold on every layout: the oracle's gradient and metrics, transformers' log-probs, exact conversion."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from layouts import (
    Stand,
    assert_same_gradient,
    assert_same_metrics,
    gradient_step,
    gradients,
    loss_of,
    make_backend,
    models_of,
    same_on_all_ranks,
    shard_of,
    weights,
)
from oracle import objective, token_scores
from stage import BUDGET, FIXED, PLAIN, TEMPERATURE, make_batch, off_policy, oracle_step
from transformers import AutoModelForCausalLM

from miles.arguments.loss import LossArguments
from miles.loss.policy_loss import samples_with_gradient
from miles.tracking.metrics import values
from miles.training.step import train_rollout

FULL: dict[str, Any] = dict(
    eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", entropy_coef=0.01
)
MODES = ("sample_mean", "prompt_mean", "token_mean", "constant")


def _equals_oracle(stand: Stand, model: str, per_token: bool) -> None:
    if stand.layout.sizes.use_distributed_optimizer:
        return  # no rank has whole gradients; the optimizer's step is compared instead
    backend, path = make_backend(stand, model, per_token=per_token), stand.model(model)
    for mode in MODES:
        loss = loss_of(mode, **FULL)
        batch = off_policy(make_batch(loss), path)
        wanted_gradient, wanted_metrics = oracle_step(path, batch, loss)
        for training in (FIXED, BUDGET):
            gradient, metrics = gradient_step(backend, shard_of(backend, batch, training), loss)
            assert_same_gradient(gradient, wanted_gradient)
            assert_same_metrics(metrics, wanted_metrics)
            assert same_on_all_ranks(values(metrics))


def gradient_equals_oracle_when_megatron_averages(stand: Stand) -> None:
    _equals_oracle(stand, "untied", per_token=False)


def gradient_equals_oracle_when_megatron_counts_tokens(stand: Stand) -> None:
    _equals_oracle(stand, "untied", per_token=True)


def gradient_of_tied_model_equals_oracle(stand: Stand) -> None:
    _equals_oracle(stand, "tied", per_token=False)


def scored_samples_change_nothing(stand: Stand) -> None:
    """Leaving out the backward of samples without advantage gives the same metrics, and the same gradient norm."""
    for per_token in (False, True):
        backend = make_backend(stand, "untied", per_token=per_token)
        for mode in ("sample_mean", "token_mean"):
            loss = loss_of(mode)
            batch = off_policy(make_batch(loss), stand.model("untied"))
            has_gradient = samples_with_gradient(loss, batch.rewards)
            assert not all(has_gradient) and any(has_gradient)
            all_trained = _norm_and_metrics(backend, shard_of(backend, batch, BUDGET), loss)
            some_scored = _norm_and_metrics(backend, shard_of(backend, batch, BUDGET, has_gradient), loss)
            assert math.isclose(all_trained[0], some_scored[0], rel_tol=1e-5)
            assert_same_metrics(some_scored[1], values(all_trained[1]))


def _norm_and_metrics(backend: Any, shard: Any, loss: LossArguments) -> tuple[float, Any]:
    backend.settings = replace(backend.settings, loss=loss)
    metrics = backend.forward_backward(shard)
    backend.optimizer.adam.prepare_grads()
    norm = float(backend.optimizer.adam.get_grad_norm())
    backend.skip_step()
    return norm, metrics


def _plain(stand: Stand, model: str, dtype: torch.dtype) -> Any:
    """transformers' own, in this process; its fused experts do not compute in float64."""
    return AutoModelForCausalLM.from_pretrained(stand.model(model), dtype=dtype, experts_implementation="eager")


def log_probs_equal_transformers(stand: Stand) -> None:
    """fp32, of every kind of model, in the order of the shard, on every rank."""
    for model in models_of(stand):
        batch = make_batch(loss_of("sample_mean"))
        backend = make_backend(stand, model)
        shard = shard_of(backend, batch, BUDGET, [i % 3 != 0 for i in range(len(batch))])
        oracle = _plain(stand, model, torch.float64)
        for i, found in enumerate(backend.log_probs(shard)):
            wanted = token_scores(oracle, shard.batch, i, TEMPERATURE)[0].detach().numpy()
            assert found.dtype == "float32" and abs(found - wanted).max() < 2e-5, model


def weights_come_back_exactly(stand: Stand) -> None:
    """Every tensor of the checkpoint, bit for bit, once; the exported folder is read by transformers."""
    ids = torch.arange(10)[None]
    for model in models_of(stand):
        plain = _plain(stand, model, torch.float32)
        backend = make_backend(stand, model)
        folder = stand.folder / f"export_{stand.name}_{model}"
        backend.export_hf(folder)
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
        assert exported.dtype == torch.float32
        found, wanted = exported.state_dict(), plain.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], weight) for name, weight in wanted.items()), model
        with torch.no_grad():
            assert torch.equal(exported(ids).logits, plain(ids).logits)


# The large epsilon keeps Adam from making full steps of gradients that are nothing but rounding.
ADAM: dict[str, Any] = dict(lr=1e-2, lr_decay_style="linear", weight_decay=0.1, clip_grad=0.05, adam_eps=1e-3)


def optimizer_is_adamw_with_clipping(stand: Stand) -> None:
    """Three steps against torch.optim.AdamW and clip_grad_norm_ on the oracle's gradients, in one process."""
    backend = make_backend(stand, "tied", **ADAM)
    plain = _plain(stand, "tied", torch.float64)
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], eps=1e-3
    )
    batch = off_policy(make_batch(PLAIN), stand.model("tied"))
    for step in range(3):
        plain.zero_grad()
        _loss(plain, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (1 - step / 10)
        adam.step()
        backend.forward_backward(shard_of(backend, batch, FIXED))
        metrics = values(backend.optimizer_step())
        assert math.isclose(metrics["grad_norm"], norm.item(), rel_tol=1e-4), f"step {step}: {metrics} for {norm}"
        assert math.isclose(metrics["lr"], 1e-2 * (1 - step / 10))
        expected = dict(plain.named_parameters())
        for name, found in weights(backend).items():
            torch.testing.assert_close(found, expected[name].detach().float(), rtol=1e-3, atol=2e-5, msg=name)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return objective(model, batch, PLAIN, TEMPERATURE)["loss"]


def step_without_loss_tokens_is_skipped(stand: Stand) -> None:
    """T = 0 under both contracts: weights and schedule stay; the step that follows is the first."""
    for per_token in (False, True):
        backend = make_backend(stand, "untied", per_token=per_token, **ADAM)
        before = weights(backend)
        empty = make_batch(PLAIN, masked=True)
        (metrics,) = train_rollout(backend, [shard_of(backend, empty, FIXED)], use_reference=False)
        assert metrics["train/skipped_steps"].value == 1.0 and metrics["train/loss"].numerator == 0.0
        after = weights(backend)
        assert all(torch.equal(before[n], after[n]) for n in before)
        shard = shard_of(backend, make_batch(PLAIN), FIXED)
        (metrics,) = train_rollout(backend, [shard], use_reference=False)
        assert metrics["train/lr"].value == 1e-2


def non_finite_gradient_leaves_the_weights(stand: Stand) -> None:
    """A NaN on one rank stops every rank."""
    backend = make_backend(stand, "untied")
    before = weights(backend)
    if stand.rank == 0:
        backend.model.buffers[0].grad_data[0] = math.nan  # as a micro-batch leaves it; the ranks' sum comes after
    backend.forward_backward(shard_of(backend, make_batch(PLAIN), FIXED))
    message = ""
    try:
        backend.optimizer_step()
    except FloatingPointError as error:
        message = str(error)
    assert "--lr" in message and "step 0" in message
    after = weights(backend)
    assert all(torch.equal(before[n], after[n]) for n in before)


def reference_stays_where_it_began(stand: Stand) -> None:
    backend = make_backend(stand, "untied", **ADAM)
    loss = loss_of("sample_mean", use_kl_loss=True, kl_loss_coef=0.1)
    backend.settings = replace(backend.settings, loss=loss)
    backend.reference = backend._build(stand.model("untied"))
    shard = shard_of(backend, make_batch(loss), FIXED)
    start = backend.log_probs(shard)
    kl = [train_rollout(backend, [shard], use_reference=True)[0]["train/kl_loss"].value for _ in range(2)]
    assert abs(kl[0]) < 1e-6 and abs(kl[1]) > 1e-4
    for found, wanted in zip(backend.log_probs(shard, reference=True), start, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


CHECKS = (
    gradient_equals_oracle_when_megatron_averages,
    gradient_equals_oracle_when_megatron_counts_tokens,
    gradient_of_tied_model_equals_oracle,
    scored_samples_change_nothing,
    log_probs_equal_transformers,
    weights_come_back_exactly,
    optimizer_is_adamw_with_clipping,
    step_without_loss_tokens_is_skipped,
    non_finite_gradient_leaves_the_weights,
    reference_stays_where_it_began,
)
__all__ = ["CHECKS", "gradients"]
