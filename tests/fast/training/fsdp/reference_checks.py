"""A reference that follows the policy, weights in the loss that adapt, and logits in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from cases import FIXED, TEMPERATURE
from followed_reference import assert_needs_the_interval
from forked_ranks import error_of
from stage import CPU, Stage, all_full, full, make_backend, make_batch, off_policy, shard_of, train
from tolerance import log_prob_error, rounding_error
from transformers import AutoModelForCausalLM

from miles.objective.settings import LossArguments
from miles.training import scoring
from miles.training.fsdp.backend import FsdpBackend
from miles.training.trainer import Trainer
from miles.types.metrics import values

KL = LossArguments(use_kl_loss=True, kl_loss_coef=0.1)
ADAM: dict[str, Any] = dict(lr=1e-2)


def _backend(
    stage: Stage, alpha: float = 1.0, bf16: bool = False, loss: LossArguments = KL, **fields: Any
) -> FsdpBackend:
    """Build a backend whose reference follows the policy."""
    plain = make_backend(stage, **ADAM).settings
    model = replace(plain.model, **({"ref_update_interval": 1, "ref_mixup_alpha": alpha} | fields))
    settings = replace(plain, model=model, loss=loss, training=replace(plain.training, bf16=bf16))
    return FsdpBackend(settings, CPU, 10)


def _weights(model: Any) -> dict[str, torch.Tensor]:
    return all_full(dict(model.module.language_model.named_parameters()))


def reference_follows_the_policy(stage: Stage) -> None:
    """Two refreshes against float64: replaced on one rank, or mixed on two without losing small changes to bf16."""
    alpha = 1.0 if stage.world == 1 else 0.3
    backend = _backend(stage, alpha, bf16=True)
    assert backend.reference is not None
    expected = {name: weight.double() for name, weight in _weights(backend.reference).items()}
    start = dict(expected)
    for seed in (1, 2):
        train(backend, [shard_of(stage, off_policy(make_batch(KL, seed=seed)), FIXED)])
        backend.refresh_reference()
        for name, weight in _weights(backend.policy).items():
            expected[name] = alpha * weight.bfloat16().double() + (1 - alpha) * expected[name]
    for name, tensor in _weights(backend.reference).items():
        largest = expected[name].abs().max().item()
        assert (tensor.double() - expected[name]).abs().max() <= rounding_error(4, largest), (alpha, name)
    moved = [(expected[name] - start[name]).abs().max().item() for name in start]
    assert max(moved) > 1e-6


def replaced_reference_has_the_policys_log_probs(stage: Stage) -> None:
    """After a refresh the KL of the next step is 0, in fp32 on one rank and in bf16 on two."""
    backend = _backend(stage, bf16=stage.world == 2)
    shard = shard_of(stage, off_policy(make_batch(KL)), FIXED)
    train(backend, [shard])
    assert backend.reference is not None
    before = scoring.log_probs(backend, backend.reference, shard)
    backend.refresh_reference()
    policy = scoring.log_probs(backend, backend.policy, shard)
    reference = scoring.log_probs(backend, backend.reference, shard)
    assert all((a == b).all() for a, b in zip(policy, reference, strict=True))
    assert any((a != b).any() for a, b in zip(policy, before, strict=True))


def another_shape_cannot_follow(stage: Stage) -> None:
    """A tied model has no separate head, which an untied one has."""
    settings = _backend(stage).settings
    for policy, reference in (("tied", "untied"), ("untied", "tied")):
        model = replace(settings.model, hf_checkpoint=stage.model(policy), ref_load=stage.model(reference))
        message = error_of(ValueError, FsdpBackend, replace(settings, model=model), CPU, 10)
        assert message.startswith(f"--ref-load {stage.model(reference)}: its lm_head.weight"), message


def resumed_reference_is_exact(stage: Stage) -> None:
    """A run that stops and resumes ends with the reference and the policy of one that did not.

    The reference is replaced on one rank, and mixed on two.
    """
    alpha, bf16 = (1.0, False) if stage.world == 1 else (0.3, True)
    folder = stage.folder / f"reference {alpha} {bf16} of {stage.world}"
    if stage.rank == 0:
        folder.mkdir()
    dist.barrier()
    shards = [shard_of(stage, off_policy(make_batch(KL, seed=seed)), FIXED) for seed in (1, 2)]
    straight = _backend(stage, alpha, bf16)
    train(straight, [shards[0]])
    straight.refresh_reference()
    straight.save(folder, {"rollouts_done": 1})
    saved = _weights(straight.reference)
    dist.barrier()
    resumed = _backend(stage, alpha, bf16)
    assert resumed.load(folder) == {"rollouts_done": 1}
    again = _backend(stage, alpha, bf16)
    again.load(folder, reference=False)
    fresh = _weights(_backend(stage, alpha, bf16).reference)
    assert all(torch.equal(fresh[name], weight) for name, weight in _weights(again.reference).items())
    assert any(not torch.equal(fresh[name], weight) for name, weight in _weights(resumed.reference).items())
    for backend in (straight, resumed):
        train(backend, [shards[1]])
        backend.refresh_reference()
    for role in ("reference", "policy"):
        expected = _weights(getattr(straight, role))
        tensors = _weights(getattr(resumed, role))
        assert all(torch.equal(tensors[name], weight) for name, weight in expected.items()), (role, alpha, bf16)
    assert_needs_the_interval(_backend(stage, 1.0, bf16, ref_update_interval=None), folder)
    advised = _backend(stage, 1.0, bf16, ref_update_interval=None, ref_load=str(folder / "reference"))
    for name, weight in _weights(advised.reference).items():
        assert torch.equal(weight, saved[name].to(weight.dtype)), name


def weights_adapt_from_step_to_step(stage: Stage) -> None:
    """The loss of each step is made with the weights that it reports, and a resumed trainer continues with them."""
    loss = replace(KL, kl_target=1e-3, kl_horizon=20.0, entropy_target=2.0, entropy_coef=0.01, entropy_coef_delta=0.02)
    backend = _backend(stage, loss=loss)
    trainer = Trainer(backend, loss, stage.world)
    shards = [shard_of(stage, off_policy(make_batch(loss, seed=seed)), FIXED) for seed in (1, 2, 3)]
    kl_weight, entropy_weight, is_low = 0.1, 0.01, True
    weights = []
    for shard, metrics in zip(shards, map(values, trainer.train(shards)), strict=True):
        kl, entropy = metrics["train/kl_loss"], metrics["train/entropy_loss"]
        assert metrics["train/kl_loss_coef"] == kl_weight
        assert metrics["train/entropy_coef"] == (entropy_weight if is_low else 0.0)
        total = metrics["train/pg_loss"] + kl_weight * kl - metrics["train/entropy_coef"] * entropy
        scale = abs(metrics["train/pg_loss"]) + kl_weight * abs(kl) + entropy
        assert abs(metrics["train/loss"] - total) <= rounding_error(100, scale)
        n = shard.batch.num_trajectories
        kl_weight *= 1 + min(max(kl / 1e-3 - 1, -0.2), 0.2) * n / 20.0
        is_low = entropy <= 2.0
        entropy_weight = min(max(entropy_weight + (0.02 if is_low else -0.02), 0.0), 1.0)
        weights.append(metrics["train/kl_loss_coef"])
    assert len(set(weights)) == 3
    resumed = Trainer(backend, loss, stage.world)
    resumed.restore_coefficients(trainer.coefficients.state())
    assert resumed.objective.flags == trainer.objective.flags
    assert resumed.objective.flags.kl_loss_coef == kl_weight


def the_weight_of_the_kl_in_the_reward_adapts_once_per_step(stage: Stage) -> None:
    """Two passes over two steps: advantages keep their weight, which moves twice for the next iteration."""
    loss = LossArguments(
        advantage_estimator="reinforce_plus_plus",
        normalize_advantages=True,
        kl_coef=0.1,
        kl_loss_type="k2",
        kl_target=1e-3,
        kl_horizon=20.0,
    )
    backend = _backend(stage, loss=loss, ref_load=stage.model("untied"))
    trainer = Trainer(backend, loss, stage.world, passes=2)
    shards = [shard_of(stage, make_batch(loss, seed=seed), FIXED) for seed in (1, 2)]
    weight = 0.1
    for _ in range(2):
        steps = [values(metrics) for metrics in trainer.train(shards)]
        assert [metrics["train/kl_coef"] for metrics in steps] == [weight] * 4
        for shard, metrics in zip(shards, steps, strict=False):
            error = min(max(metrics["train/reward_kl"] / 1e-3 - 1, -0.2), 0.2)
            weight *= 1 + error * shard.batch.num_trajectories / 20.0
        assert trainer.objective.flags.kl_coef == weight
    assert weight != 0.1


def logits_are_fp32_under_a_bf16_body(stage: Stage) -> None:
    """Log-probs and the head's gradient agree with float64, from the body's own bf16 hidden states and weights."""
    seen: list[torch.Tensor] = []
    errors = {}
    for fp32 in (False, True):
        plain = make_backend(stage).settings
        backend = FsdpBackend(replace(plain, training=replace(plain.training, bf16=True, fp32_lm_head=fp32)), CPU, 10)
        shard = shard_of(stage, make_batch(LossArguments()), FIXED)
        body = backend.policy.module.language_model.base_model
        body.register_forward_hook(lambda *given: seen.append(given[-1].last_hidden_state.flatten(0, 1).detach()))

        def scored(micro: Any, scorer: Any) -> tuple[Any, torch.Tensor]:
            return micro, scorer(with_entropy=False).log_probs

        seen.clear()
        results = backend.policy.forward(shard, shard.micro_batches, scored)
        head = full(backend.policy.module.language_model.get_output_embeddings().weight).bfloat16().double()
        worst = 0.0
        for hidden, (micro, log_probs) in zip(seen, results, strict=True):
            assert hidden.dtype == torch.bfloat16 and log_probs.dtype == torch.float32
            logits = hidden[micro.logit_index].double() @ head.t() / TEMPERATURE
            expected = logits.log_softmax(-1).gather(1, micro.targets[:, None])[:, 0]
            if len(expected):
                worst = max(worst, (log_probs.double() - expected).abs().max().item() / logits.abs().max().item())
        errors[fp32] = worst
        policy = Trainer(backend, LossArguments(), stage.world).policy
        policy.model.forward_backward(shard, policy.loss_function)
        gradient = full(backend.policy.module.language_model.get_output_embeddings().weight.grad)
        assert gradient.dtype == torch.float32 and gradient.abs().max() > 0
    bound = rounding_error(32 + 64, 1.0)  # the sums of the product and of the softmax, over logits of size 1
    assert errors[True] < bound
    assert stage.world > 1 or errors[False] > 30 * bound


def sums_of_squared_probs_are_those_of_the_model(stage: Stage) -> None:
    """They come from log-probs at two temperatures; compare with float64 over the vocabulary, sample by sample."""
    loss = LossArguments(advantage_estimator="optimal_token_baseline")
    backend = make_backend(stage, loss=loss)
    trainer = Trainer(backend, loss, stage.world)
    shard = shard_of(stage, make_batch(loss), FIXED)
    scored = scoring.score(backend, shard, scoring.needs_of(trainer.objective, 0, True)).batch
    assert scored.sum_squared_probs is not None
    model = AutoModelForCausalLM.from_pretrained(stage.model("untied"), dtype=torch.float64)
    tolerance = 4 * log_prob_error(model, scored.tokens, TEMPERATURE)  # relative: of 2 log p - log q
    for tokens, response, sums in zip(scored.tokens, scored.response_lengths, scored.sum_squared_probs, strict=True):
        with torch.no_grad():
            logits = model(torch.as_tensor(tokens)[None]).logits[0, -response - 1 : -1] / TEMPERATURE
        expected = logits.softmax(-1).square().sum(-1).numpy()
        assert sums.dtype == "float64" and (abs(sums - expected) <= tolerance * expected).all()
    shard, _ = trainer._with_advantages(replace(shard, batch=scored))
    assert shard.batch.advantages is not None and any(column.any() for column in shard.batch.advantages)


CHECKS = (
    sums_of_squared_probs_are_those_of_the_model,
    reference_follows_the_policy,
    replaced_reference_has_the_policys_log_probs,
    another_shape_cannot_follow,
    resumed_reference_is_exact,
    weights_adapt_from_step_to_step,
    the_weight_of_the_kl_in_the_reward_adapts_once_per_step,
    logits_are_fp32_under_a_bf16_body,
)
