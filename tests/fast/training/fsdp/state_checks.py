"""The optimizer, the steps of an iteration, exports and checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from cases import BUDGET, FIXED, TEMPERATURE
from forked_ranks import error_of
from oracle import token_scores
from safetensors.torch import load_file
from stage import (
    CPU,
    PACKED,
    PADDED,
    PLAIN,
    Stage,
    full,
    gradients,
    log_probs,
    make_backend,
    make_batch,
    off_policy,
    shard_of,
    train,
    weights,
)
from tolerance import FEW_ROUNDINGS, KIND_LOG_PROB_ERROR, RELATIVE_ERROR, adam_error, log_prob_error
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from transformers import AutoModelForCausalLM

from miles.config.parallel import ParallelArguments
from miles.engine.embedded.model_runner import ModelRunner
from miles.objective.settings import LossArguments
from miles.training.checkpoint_io import StagedFiles
from miles.training.fsdp import packing_check
from miles.training.fsdp.backend import FsdpBackend
from miles.training.fsdp.runner import FsdpTrainedModel
from miles.training.trainer import Trainer
from miles.types.metrics import values
from miles.types.train_batch import TrainShard
from miles.types.weights import WeightChunk


def _plain(stage: Stage, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(stage.model("untied"), dtype=dtype)


ADAM: dict[str, Any] = dict(lr=1e-2, lr_decay_style="linear", weight_decay=0.1, clip_grad=0.05)
TOTAL_STEPS = 10


def accumulate(backend: FsdpBackend, shard: TrainShard) -> None:
    """Accumulate the gradient of a step without calling the optimizer."""
    policy = Trainer(backend, backend.settings.loss, dist.get_world_size()).policy
    policy.model.forward_backward(shard, policy.loss_function)


def optimizer_is_adamw_with_clipping(stage: Stage) -> None:
    """Compare three steps with torch.optim.AdamW and clip_grad_norm_ on whole tensors in one process."""
    backend = make_backend(stage, total_steps=TOTAL_STEPS, **ADAM)
    plain = {n: torch.nn.Parameter(w) for n, w in weights(backend).items()}
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in plain.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in plain.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        eps=1e-8,
    )
    shard = shard_of(stage, off_policy(make_batch(PLAIN)), FIXED)
    for step in range(3):
        accumulate(backend, shard)
        for name, gradient in gradients(backend).items():
            plain[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.05)
        assert norm > 0.05, "the gradient must be long enough to be clipped"
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (1 - step / TOTAL_STEPS)
        adam.step()
        metrics = values(backend.policy.optimizer.step())
        assert math.isclose(metrics["grad_norm"], norm.item(), rel_tol=RELATIVE_ERROR)
        assert math.isclose(metrics["lr"], 1e-2 * (1 - step / TOTAL_STEPS))
        # The gradients are the same. Clipping divides all of them by a norm that was summed in another order.
        error = adam_error(ADAM["lr"], step + 1, RELATIVE_ERROR)
        for name, tensor in weights(backend).items():
            torch.testing.assert_close(tensor, plain[name].detach(), rtol=FEW_ROUNDINGS, atol=error, msg=name)


def step_without_loss_tokens_is_skipped(stage: Stage) -> None:
    """With T = 0, weights and schedule stay, and the next step is the first."""
    backend = make_backend(stage, total_steps=TOTAL_STEPS, **ADAM)
    before = weights(backend)
    empty = make_batch(PLAIN, masked=True)
    assert empty.num_loss_tokens == 0
    (metrics,) = train(backend, [shard_of(stage, empty, FIXED)])
    assert metrics["train/skipped_steps"].value == 1.0 and "train/loss" not in metrics
    assert "train/lr" not in metrics and backend.policy.optimizer.steps_done == 0
    after = weights(backend)
    assert all(torch.equal(before[n], after[n]) for n in before)
    (metrics,) = train(backend, [shard_of(stage, make_batch(PLAIN), FIXED)])
    assert metrics["train/lr"].value == 1e-2


def non_finite_gradient_leaves_the_weights(stage: Stage) -> None:
    """A NaN on one rank stops every rank."""
    for poison in (math.nan, math.inf):
        backend = make_backend(stage)
        before = weights(backend)
        accumulate(backend, shard_of(stage, make_batch(PLAIN), FIXED))
        if stage.rank == 0:
            gradient = next(p.grad for p in backend.policy.module.parameters() if p.grad is not None)
            gradient.to_local().view(-1)[0] = poison  # type: ignore[union-attr]
        message = error_of(FloatingPointError, backend.policy.optimizer.step)
        assert "--lr" in message and "step 0" in message
        after = weights(backend)
        assert all(torch.equal(before[n], after[n]) for n in before)


def later_steps_use_log_probs_of_the_start(stage: Stage) -> None:
    backend = make_backend(stage, total_steps=TOTAL_STEPS, **ADAM)
    shards = [shard_of(stage, make_batch(PLAIN, seed=seed), FIXED) for seed in (1, 2, 3)]
    at_start = [log_probs(backend, shard) for shard in shards]
    trained: list[TrainShard] = []

    def noted(shard: TrainShard, loss_function: Any) -> Any:
        trained.append(shard)
        return FsdpTrainedModel.forward_backward(backend.policy, shard, loss_function)

    with patch.object(backend.policy, "forward_backward", noted):
        metrics = train(backend, shards)
    assert trained[0].batch.old_log_probs is None
    for shard, wanted in zip(trained[1:], at_start[1:], strict=True):
        assert shard.batch.old_log_probs is not None
        for column, start in zip(shard.batch.old_log_probs, wanted, strict=True):
            np.testing.assert_array_equal(column, start)
    assert metrics[0]["train/ppo_kl"].value == 0.0 and all(m["train/ppo_kl"].value != 0.0 for m in metrics[1:])
    np.testing.assert_allclose([m["train/lr"].value for m in metrics], [1e-2, 9e-3, 8e-3])


def reference_keeps_its_first_weights(stage: Stage) -> None:
    """The reference keeps the log-probs of the start after the policy has moved, so the KL is not 0 then."""
    backend = make_backend(stage, total_steps=TOTAL_STEPS, **ADAM)
    loss = LossArguments(use_kl_loss=True, kl_loss_coef=0.1)
    backend.settings = replace(backend.settings, loss=loss)
    backend.reference = make_backend(stage).policy
    backend.reference.module.eval().requires_grad_(False)
    shard = shard_of(stage, make_batch(loss), FIXED)
    start = log_probs(backend, shard)
    tolerance = log_prob_error(_plain(stage), shard.batch.tokens, TEMPERATURE)
    kl = [train(backend, [shard])[0]["train/kl_loss"].value, train(backend, [shard])[0]["train/kl_loss"].value]
    assert abs(kl[0]) < tolerance and abs(kl[1]) > 1e-4  # k1: the mean difference of log-probs
    for column, wanted in zip(log_probs(backend, shard, reference=True), start, strict=True):
        np.testing.assert_allclose(column, wanted, rtol=0, atol=tolerance)


def log_probs_come_back_in_the_order_of_the_shard(stage: Stage) -> None:
    """Packed samples get the log-probs that transformers computes for each sample alone."""
    batch = make_batch(PLAIN)
    shard = shard_of(stage, batch, BUDGET, [i % 3 != 0 for i in range(len(batch))])
    model = _plain(stage, torch.float64)
    tolerance = log_prob_error(model, batch.tokens, TEMPERATURE)
    for i, column in enumerate(log_probs(make_backend(stage), shard)):
        wanted, _ = token_scores(model, shard.batch.tokens[i], shard.batch.response_lengths[i], TEMPERATURE)
        assert column.dtype == "float32" and abs(column - wanted.detach().numpy()).max() < tolerance


def export_is_read_by_transformers(stage: Stage) -> None:
    """An exported folder gives the logits of the trained weights, tied and untied. Chunks have every weight once."""
    ids = torch.arange(10)[None]
    for name in ("tied", "untied"):
        backend = make_backend(stage, name, **ADAM)
        train(backend, [shard_of(stage, make_batch(PLAIN), FIXED)])
        plain = AutoModelForCausalLM.from_pretrained(stage.model(name), dtype=torch.float32)
        names = [n for chunk in backend.export_weights() for n in chunk.tensors]
        assert names == [n for n, _ in plain.named_parameters()]
        plain.load_state_dict(weights(backend), strict=False)
        folder = stage.folder / f"export_{name}_{stage.world}"
        backend.export_hf(folder)
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert exported.dtype == torch.float32
        with torch.no_grad():
            torch.testing.assert_close(exported(ids).logits, plain(ids).logits, rtol=0, atol=log_prob_error(plain, ids))


def biases_of_experts_are_exported_sent_and_saved(stage: Stage) -> None:
    """They are buffers in fp32, which training leaves unchanged."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    backend = make_backend(stage, "sigmoid", **ADAM)
    train(backend, [shard_of(stage, make_batch(PLAIN), FIXED)])
    expected = AutoModelForCausalLM.from_pretrained(stage.model("sigmoid")).state_dict()[name]
    sent = {n: t for chunk in backend.export_weights() for n, t in chunk.tensors.items()}
    assert torch.equal(sent[name], expected) and expected.abs().min() > 0
    ModelRunner(stage.model("sigmoid"), torch.float32, "cpu").load_weights([WeightChunk(sent)])
    backend.settings = replace(backend.settings, rollout=replace(backend.settings.rollout, rollout_engine="sglang"))
    to_servers = {n for chunk in backend.export_weights() for n in chunk.tensors}
    assert to_servers == load_file(Path(stage.model("sigmoid")) / "model.safetensors").keys()
    folder = stage.folder / f"export_sigmoid_{stage.world}"
    backend.export_hf(folder)
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(exported.state_dict()[name], expected)
    assert exported.config.num_nextn_predict_layers == 0  # the export has no heads of multi-token prediction
    assert name in get_model_state_dict(backend.policy.module.language_model)  # what checkpoints have


def _train_two_steps(stage: Stage, backend: FsdpBackend) -> None:
    for seed in (1, 2):
        train(backend, [shard_of(stage, make_batch(PLAIN, seed=seed), FIXED)])


def going_to_host_memory_and_back_changes_nothing(stage: Stage) -> None:
    straight, there_and_back = (make_backend(stage, total_steps=TOTAL_STEPS, **ADAM) for _ in range(2))
    shards = [shard_of(stage, make_batch(PLAIN, seed=seed), FIXED) for seed in (1, 2)]
    for shard in shards:
        train(straight, [shard])
        train(there_and_back, [shard])
        there_and_back.offload()
        there_and_back.onload()
    expected = weights(straight)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(there_and_back).items())


def _adam_state(backend: FsdpBackend) -> dict[str, dict[str, torch.Tensor]]:
    state: Any = get_optimizer_state_dict(backend.policy.module.language_model, backend.policy.optimizer.adam)["state"]
    return {name: {key: full(value) for key, value in of.items()} for name, of in state.items()}


def save_checkpoint(stage: Stage) -> None:
    """Train and save on two ranks; also save the whole tensors that the loader must find.

    The files are written during training, and hold the state at the time when they were staged.
    """
    backend = make_backend(stage, **ADAM)
    _train_two_steps(stage, backend)
    folder = stage.folder / "checkpoint"
    folder.mkdir(exist_ok=True)
    staged = StagedFiles()
    backend.save(folder, {"rollout": 2}, staged)
    assert not list(folder.glob("*.distcp")) and not (folder / ".metadata").exists()
    wanted = {"weights": weights(backend), "adam": _adam_state(backend)}
    _train_two_steps(stage, backend)
    staged.write()
    wanted["later"] = weights(backend)
    if stage.rank == 0:
        torch.save(wanted, stage.folder / "wanted.pt")
    dist.barrier()


def checkpoint_survives_another_number_of_ranks(stage: Stage) -> None:
    """Weights, Adam's moments and the schedule are equal, and so is the next training step."""
    wanted = torch.load(stage.folder / "wanted.pt")
    backend = make_backend(stage, **ADAM)
    assert backend.load(stage.folder / "checkpoint") == {"rollout": 2}
    assert backend.policy.optimizer.steps_done == 2
    tensors = weights(backend)
    assert all(torch.equal(tensors[n], w) for n, w in wanted["weights"].items())
    adam = _adam_state(backend)
    assert adam.keys() == wanted["adam"].keys()
    for name, state in wanted["adam"].items():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(adam[name][key], value) for key, value in state.items()), name
    _train_two_steps(stage, backend)
    error = adam_error(ADAM["lr"], steps=2)
    for name, later in weights(backend).items():
        torch.testing.assert_close(later, wanted["later"][name], rtol=FEW_ROUNDINGS, atol=error, msg=name)


def saving_before_the_first_step_changes_nothing(stage: Stage) -> None:
    """Continuing from such a checkpoint changes nothing either, though PyTorch creates Adam's state to save it."""
    plain, saving, resumed = (make_backend(stage, **ADAM) for _ in range(3))
    folder = stage.folder / "before"
    folder.mkdir(exist_ok=True)
    saving.save(folder, {"rollout": 0})
    dist.barrier()
    resumed.load(folder)
    _train_two_steps(stage, plain)
    for backend in (saving, resumed):
        _train_two_steps(stage, backend)
        tensors = weights(backend)
        assert all(torch.equal(tensors[n], w) for n, w in weights(plain).items())


def resumed_run_has_its_own_settings_of_adam(stage: Stage) -> None:
    """``--load`` brings back Adam's moments, and the flags of the new command hold."""
    own = dict(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-5)
    backend = make_backend(stage, **(ADAM | own))
    backend.load(stage.folder / "checkpoint")
    groups = backend.policy.optimizer.adam.param_groups
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}
    assert {(*group["betas"], group["eps"]) for group in groups} == {(0.8, 0.9, 1e-5)}
    assert _adam_state(backend), "the moments are there"


def checkpoint_without_optimizer_starts_from_zero(stage: Stage) -> None:
    wanted = torch.load(stage.folder / "wanted.pt")["weights"]
    backend = make_backend(stage, **ADAM)
    seed = torch.get_rng_state()
    backend.load(stage.folder / "checkpoint", optimizer=False, rng=False)
    assert torch.equal(torch.get_rng_state(), seed)
    assert backend.policy.optimizer.steps_done == 0 and not backend.policy.optimizer.adam.state
    tensors = weights(backend)
    assert all(torch.equal(tensors[n], w) for n, w in wanted.items())


def reference_comes_from_a_checkpoint(stage: Stage) -> None:
    """``--ref-load`` names a checkpoint of this backend."""
    trained = make_backend(stage, **ADAM)
    trained.load(stage.folder / "checkpoint")
    shard = shard_of(stage, make_batch(PLAIN), FIXED)
    expected = log_probs(trained, shard)
    model = replace(trained.settings.model, ref_load=str(stage.folder / "checkpoint"))
    settings = replace(trained.settings, model=model, loss=replace(PLAIN, use_kl_loss=True))
    backend = FsdpBackend(settings, CPU, TOTAL_STEPS)
    reference, policy = log_probs(backend, shard, reference=True), log_probs(backend, shard)
    plain = _plain(stage)  # its logits are about as large after training
    tolerance = log_prob_error(plain, shard.batch.tokens, TEMPERATURE)
    assert all(abs(reference[i] - column).max() < tolerance for i, column in enumerate(expected))
    assert max(abs(reference[i] - policy[i]).max() for i in range(len(reference))) > 1e-3


def checkpoint_of_another_backend_is_refused(stage: Stage) -> None:
    folder = stage.folder / f"other_{stage.world}"
    folder.mkdir()
    state = json.loads((stage.folder / "checkpoint" / "state.json").read_text()) | {"backend": "megatron"}
    (folder / "state.json").write_text(json.dumps(state))
    message = error_of(ValueError, make_backend(stage).load, folder)
    assert message.startswith("--load: ") and "--train-backend megatron" in message


def random_state_comes_back(stage: Stage) -> None:
    backend = make_backend(stage)
    folder = stage.folder / f"random_{stage.world}"
    folder.mkdir(exist_ok=True)
    torch.manual_seed(100 + stage.rank)
    backend.save(folder, {})
    wanted = torch.rand(4)
    torch.manual_seed(0)
    backend.load(folder)
    assert torch.equal(torch.rand(4), wanted)
    assert json.loads((folder / "state.json").read_text())["launcher"] == {}
    torch.manual_seed(1)
    wanted = torch.rand(4)
    torch.manual_seed(1)
    backend.load(folder, rng=False)  # --no-load-rng
    assert torch.equal(torch.rand(4), wanted)


def recurrent_models_are_trained_packed(stage: Stage) -> None:
    _check_layers(stage, "recurrent", PACKED)


def recurrent_models_are_trained_on_padded_rows(stage: Stage) -> None:
    _check_layers(stage, "recurrent", PADDED)


def sparse_attention_is_trained_packed(stage: Stage) -> None:
    _check_layers(stage, "sparse", PACKED)


def windows_and_sinks_are_trained_packed(stage: Stage) -> None:
    _check_layers(stage, "windowed", PACKED)


def windows_and_sinks_are_trained_on_padded_rows(stage: Stage) -> None:
    _check_layers(stage, "windowed", PADDED)


def _check_layers(stage: Stage, name: str, parallel: ParallelArguments) -> None:
    """Log-probs agree with transformers before and after a step; if packed, its result is saved and read."""
    backend = make_backend(stage, name, parallel=parallel, lr=1e-2)
    shard = shard_of(stage, make_batch(PLAIN), FIXED, parallel=parallel)
    own = AutoModelForCausalLM.from_pretrained(stage.model(name))
    for _ in range(2):
        own.load_state_dict(weights(backend), strict=False)
        for i, actual in enumerate(log_probs(backend, shard)):
            tokens, response = torch.as_tensor(shard.batch.tokens[i]), shard.batch.response_lengths[i]
            with torch.no_grad():
                log_p = (own(tokens[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
            wanted = log_p[:-1].gather(-1, tokens[1:, None])[-response:, 0].numpy()
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=KIND_LOG_PROB_ERROR)
        before = weights(backend)
        train(backend, [shard])
        changed = {name for name, now in weights(backend).items() if not torch.equal(before[name], now)}
        assert changed == {name for name in before if ".indexer." not in name}
    if parallel.pads:
        return
    folder = stage.folder / f"{name}_checkpoint"
    folder.mkdir(exist_ok=True)
    backend.save(folder, {})
    resumed = make_backend(stage, name, parallel=parallel, lr=1e-2)
    resumed.load(folder)
    for each in (backend, resumed):
        train(each, [shard])
    actual = weights(resumed)
    assert all(torch.equal(actual[name], now) for name, now in weights(backend).items())


def a_reference_in_bf16_may_have_weights_that_transformers_keeps_in_fp32(stage: Stage) -> None:
    """FSDP shards parameters of one dtype."""
    for name in ("sparse", "windowed"):
        plain = make_backend(stage, name, loss=replace(PLAIN, use_kl_loss=True)).settings
        backend = FsdpBackend(replace(plain, training=replace(plain.training, bf16=True)), CPU, TOTAL_STEPS)
        shard = shard_of(stage, make_batch(PLAIN), FIXED)
        for column, expected in zip(log_probs(backend, shard), log_probs(backend, shard, reference=True), strict=True):
            np.testing.assert_array_equal(column, expected)


def models_that_cannot_be_packed_are_refused(stage: Stage) -> None:
    """By name, and by a comparison if the name tells nothing."""
    rules = {
        True: "a jamba has recurrent state, which may pass from one packed sample to the next",
        False: "log-probs of a jamba depend on the samples that are packed before: on 17 tokens they differ by",
    }
    for is_known, rule in rules.items():
        with patch.object(packing_check, "must_be_padded", lambda config, is_known=is_known: is_known):
            message = error_of(ValueError, make_backend, stage, "untested")
        assert message.startswith(f"--hf-checkpoint {stage.model('untested')}: {rule}"), message
        assert message.endswith("add --qkv-format bshd"), message


CHECKS = (
    models_that_cannot_be_packed_are_refused,
    optimizer_is_adamw_with_clipping,
    step_without_loss_tokens_is_skipped,
    non_finite_gradient_leaves_the_weights,
    later_steps_use_log_probs_of_the_start,
    reference_keeps_its_first_weights,
    log_probs_come_back_in_the_order_of_the_shard,
    export_is_read_by_transformers,
    biases_of_experts_are_exported_sent_and_saved,
    random_state_comes_back,
    saving_before_the_first_step_changes_nothing,
    going_to_host_memory_and_back_changes_nothing,
)
ON_TWO_RANKS = (
    save_checkpoint,
    recurrent_models_are_trained_packed,
    recurrent_models_are_trained_on_padded_rows,
    sparse_attention_is_trained_packed,
    windows_and_sinks_are_trained_packed,
    windows_and_sinks_are_trained_on_padded_rows,
    a_reference_in_bf16_may_have_weights_that_transformers_keeps_in_fp32,
)
AFTER_TWO_RANKS = (
    checkpoint_survives_another_number_of_ranks,
    resumed_run_has_its_own_settings_of_adam,
    checkpoint_without_optimizer_starts_from_zero,
    reference_comes_from_a_checkpoint,
    checkpoint_of_another_backend_is_refused,
)
