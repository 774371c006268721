"""On-policy distillation: the gradient of a step with a teacher in the trainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from cases import FIXED, TEMPERATURE
from oracle import token_scores
from stage import CPU, Stage, full, make_backend, make_batch, off_policy, shard_of
from tolerance import RELATIVE_ERROR
from transformers import AutoModelForCausalLM

from miles.objective.settings import LossArguments
from miles.training.fsdp.backend import FsdpBackend
from miles.training.scoring import needs_of, score
from miles.training.trainer import Trainer

COEF = 0.7


def _float64(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def gradient_of_distillation_is_that_of_the_formula(stage: Stage) -> None:
    """Compare with float64: A_t less coef (log p_old - log p_teacher), in every sample, also those whose A is 0."""
    loss = LossArguments(use_opd=True, opd_kl_coef=COEF)
    settings = make_backend(stage, loss=LossArguments()).settings
    settings = replace(settings, loss=loss, model=replace(settings.model, opd_teacher_load=stage.model("tied")))
    backend = FsdpBackend(settings, CPU, 10)
    trainer = Trainer(backend, loss, stage.world)
    batch = off_policy(make_batch(loss))
    assert 0.0 in batch.rewards and any(batch.rewards)
    shard = score(backend, shard_of(stage, batch, FIXED), needs_of(trainer.objective, 0, True))
    shard, metrics = trainer._with_advantages(shard)
    trainer.policy.model.forward_backward(shard, trainer.policy.loss_function)

    policy, teacher = _float64(stage.model("untied")), _float64(stage.model("tied"))
    total: Any = 0.0
    distance = 0.0
    assert batch.old_log_probs is not None
    for i, tokens in enumerate(batch.tokens):
        response = batch.response_lengths[i]
        mask = torch.as_tensor(batch.loss_masks[i]).double()
        old = torch.as_tensor(batch.old_log_probs[i]).double()
        with torch.no_grad():
            d = old - token_scores(teacher, tokens, response, TEMPERATURE)[0]
        advantage = float(batch.rewards[i]) - COEF * d
        ratio = (token_scores(policy, tokens, response, TEMPERATURE)[0] - old).exp()
        token_loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        total = total + (token_loss * mask).sum() / float(batch.sample_denoms[i])
        distance += float((d * mask).sum())
    (total / batch.num_trajectories).backward()
    wanted = dict(policy.named_parameters())
    for name, parameter in backend.policy.module.language_model.named_parameters():
        gradient, expected = full(parameter.grad).double(), wanted[name].grad
        assert (gradient - expected).norm() <= RELATIVE_ERROR * expected.norm(), name
    mean = distance / batch.num_loss_tokens
    assert abs(metrics["train/opd_kl"].value - mean) <= RELATIVE_ERROR * abs(mean)


CHECKS = (gradient_of_distillation_is_that_of_the_formula,)
