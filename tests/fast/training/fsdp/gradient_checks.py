"""The gradient and the metrics of a step do not know how the step was split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from oracle import load_oracle, token_scores
from stage import (
    BUDGET,
    FIXED,
    TEMPERATURE,
    Stage,
    assert_equal_on_all_ranks,
    assert_same_gradient,
    assert_same_metrics,
    gradient_step,
    loss_of,
    make_backend,
    make_batch,
    off_policy,
    oracle_step,
    shard_of,
)

from miles.loss.policy_loss import samples_with_gradient
from miles.tracking.metrics import values

FULL: dict[str, Any] = dict(
    eps_clip_high=0.28, use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", entropy_coef=0.01
)


def _equals_oracle(stage: Stage, model: str) -> None:
    backend, path = make_backend(stage, model), stage.model(model)
    for mode in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        loss = loss_of(mode, **FULL)
        batch = off_policy(make_batch(loss), path)
        wanted_gradient, wanted_metrics = oracle_step(path, batch, loss)
        assert 0.1 < wanted_metrics["pg_clipfrac"] < 0.9, "the batch must have ratios on both sides of the clip"
        for training in (FIXED, BUDGET):
            gradient, metrics = gradient_step(backend, shard_of(stage, batch, training), loss)
            assert_same_gradient(gradient, wanted_gradient)
            assert_same_metrics(metrics, wanted_metrics)
            assert_equal_on_all_ranks(metrics)


def gradient_of_tied_model_equals_oracle(stage: Stage) -> None:
    _equals_oracle(stage, "tied")


def gradient_of_untied_model_equals_oracle(stage: Stage) -> None:
    _equals_oracle(stage, "untied")


def first_step_is_on_policy(stage: Stage) -> None:
    """Without old log-probs the current ones, detached, stand in: ratio 1, nothing clipped."""
    loss = loss_of("sample_mean")
    batch = make_batch(loss)
    wanted_gradient, wanted_metrics = oracle_step(stage.model("untied"), batch, loss)
    gradient, metrics = gradient_step(make_backend(stage), shard_of(stage, batch, FIXED), loss)
    assert_same_gradient(gradient, wanted_gradient)
    assert_same_metrics(metrics, wanted_metrics)
    assert metrics["ppo_kl"].value == metrics["pg_clipfrac"].value == 0.0


def scored_samples_change_nothing(stage: Stage) -> None:
    """Leaving out the backward of samples without advantage gives the gradient and metrics of training on them."""
    backend = make_backend(stage)
    for mode in ("sample_mean", "token_mean"):
        loss = loss_of(mode)
        batch = off_policy(make_batch(loss), stage.model("untied"))
        has_gradient = samples_with_gradient(loss, batch.rewards)
        assert not all(has_gradient) and any(has_gradient)
        for training in (FIXED, BUDGET):
            all_trained = gradient_step(backend, shard_of(stage, batch, training), loss)
            some_scored = gradient_step(backend, shard_of(stage, batch, training, has_gradient), loss)
            assert_same_gradient(some_scored[0], all_trained[0])
            assert_same_metrics(some_scored[1], values(all_trained[1]))


def step_of_scored_samples_only(stage: Stage) -> None:
    """Every reward equal: one empty micro-batch is trained on, and the gradient is exactly zero."""
    loss = loss_of("sample_mean")
    batch = replace(make_batch(loss), rewards=[0.0] * 8)
    shard = shard_of(stage, batch, FIXED, samples_with_gradient(loss, batch.rewards))
    gradient, metrics = gradient_step(make_backend(stage), shard, loss)
    assert all(g.count_nonzero() == 0 for g in gradient.values())
    assert_same_metrics(metrics, oracle_step(stage.model("untied"), batch, loss)[1])


def ranks_without_samples(stage: Stage) -> None:
    """One sample for all ranks: the others take part in every collective and add zero."""
    backend = make_backend(stage)
    for mode in ("prompt_mean", "constant"):
        loss = loss_of(mode, **FULL)
        whole = make_batch(loss, groups=(((6,), (7,)),))
        batch = replace(off_policy(whole, stage.model("untied")).select([1]), num_rollouts=1)
        alone = replace(batch, sample_denoms=[8.0 if mode == "constant" else float(batch.loss_masks[0].sum())])
        wanted_gradient, wanted_metrics = oracle_step(stage.model("untied"), alone, loss)
        for training in (FIXED, BUDGET):
            gradient, metrics = gradient_step(backend, shard_of(stage, alone, training), loss)
            assert_same_gradient(gradient, wanted_gradient)
            assert_same_metrics(metrics, wanted_metrics)


def log_probs_come_back_in_the_order_of_the_shard(stage: Stage) -> None:
    batch = make_batch(loss_of("sample_mean"))
    shard = shard_of(stage, batch, BUDGET, [i % 3 != 0 for i in range(len(batch))])
    model = load_oracle(stage.model("untied"))
    for i, found in enumerate(make_backend(stage).log_probs(shard)):
        wanted = token_scores(model, shard.batch, i, TEMPERATURE)[0].detach().numpy()
        assert found.dtype == "float32" and abs(found - wanted).max() < 1e-5


CHECKS = (
    gradient_of_tied_model_equals_oracle,
    gradient_of_untied_model_equals_oracle,
    first_step_is_on_policy,
    scored_samples_change_nothing,
    step_of_scored_samples_only,
    ranks_without_samples,
    log_probs_come_back_in_the_order_of_the_shard,
)
