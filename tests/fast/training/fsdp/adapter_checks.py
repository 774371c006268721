"""A low-rank adapter: its gradients, its sum with the weights, its files, and weights that stay unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from batches import batch_of
from cases import ANYWHERE, FIXED, TEMPERATURE, Case
from forked_ranks import error_of
from oracle import token_scores
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from stage import CPU, UNEVEN, Stage, all_full, full, log_probs, make_backend, make_batch, off_policy, shard_of, train
from state_checks import ADAM, accumulate
from tolerance import RELATIVE_ERROR, log_prob_error
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from miles.config.lora import LoraArguments
from miles.objective.settings import LossArguments
from miles.training.adapter_folder import adapter_folder
from miles.training.fsdp.backend import FsdpBackend
from miles.training.fsdp.checkpoint import export

LORA = LoraArguments(lora_rank=3, lora_alpha=8)
SOME = replace(LORA, target_modules=("q_proj,v_proj", "down_proj"))
KL = LossArguments(use_kl_loss=True, kl_loss_coef=0.1)


def _backend(stage: Stage, lora: LoraArguments = LORA, bf16: bool = False, loss: LossArguments = KL) -> FsdpBackend:
    plain = make_backend(stage, loss=replace(loss, use_kl_loss=False, kl_loss_coef=0.0), **ADAM).settings
    settings = replace(plain, lora=lora, loss=loss, training=replace(plain.training, bf16=bf16))
    return FsdpBackend(settings, CPU, 10)


def _parameters(backend: FsdpBackend) -> dict[str, torch.nn.Parameter]:
    return dict(backend.policy.module.language_model.named_parameters())


def _adapter(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return all_full({name: p for name, p in _parameters(backend).items() if p.requires_grad})


def _frozen(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    return all_full({name: p for name, p in _parameters(backend).items() if not p.requires_grad})


def _step(stage: Stage, backend: FsdpBackend, seed: int = 0) -> dict[str, float]:
    (metrics,) = train(backend, [shard_of(stage, off_policy(make_batch(KL, seed=seed)), FIXED)])
    return {name: metric.value for name, metric in metrics.items()}


def _weights_on_disk(stage: Stage, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(stage.model("untied"), dtype=dtype)
    return {name: p.detach() for name, p in model.named_parameters()}


def new_adapter_changes_no_log_prob(stage: Stage) -> None:
    """B is 0: policy, reference and a model without adapter agree bit for bit, in fp32 and bf16."""
    shard = shard_of(stage, make_batch(KL), FIXED)
    for bf16 in (False, True):
        backend = _backend(stage, bf16=bf16)
        none = _backend(stage, LoraArguments(), bf16=bf16, loss=LossArguments())
        policy, reference = log_probs(backend, shard), log_probs(backend, shard, reference=True)
        for column, base, wanted in zip(policy, reference, log_probs(none, shard), strict=True):
            np.testing.assert_array_equal(column, wanted)
            np.testing.assert_array_equal(base, wanted)


def only_the_adapter_learns(stage: Stage) -> None:
    """Two steps leave every other weight unchanged on disk, bit for bit, and the reference's log-probs too.

    In fp32 on one rank, in bf16 on two.
    """
    bf16, dtype = (False, torch.float32) if stage.world == 1 else (True, torch.bfloat16)
    backend = _backend(stage, bf16=bf16)
    shard = shard_of(stage, make_batch(KL), FIXED)
    before, start = _adapter(backend), log_probs(backend, shard, reference=True)
    assert {p.dtype for p in before.values()} == {torch.float32}
    metrics = [_step(stage, backend, seed) for seed in (1, 2)]
    assert metrics[0]["train/kl_loss"] == 0.0 and metrics[1]["train/kl_loss"] != 0.0
    frozen, wanted = _frozen(backend), _weights_on_disk(stage, dtype)
    assert {name.replace(".base_layer", "") for name in frozen} == wanted.keys()
    for name, weight in frozen.items():
        assert torch.equal(weight, wanted[name.replace(".base_layer", "")]), name
    assert not any(torch.equal(before[name], weight) for name, weight in _adapter(backend).items())
    state = backend.policy.optimizer.adam.state
    assert len(state) == len(before) and sum(s["exp_avg"].numel() for s in state.values()) == sum(
        p.numel() for p in before.values()
    )
    assert max(abs(a - b).max() for a, b in zip(log_probs(backend, shard), start, strict=True)) > 1e-3
    for column, first in zip(log_probs(backend, shard, reference=True), start, strict=True):
        np.testing.assert_array_equal(column, first)


def gradient_is_that_of_peft(stage: Stage) -> None:
    """Compare with peft on a plain model in float64, each sample on its own, after B has moved away from 0."""
    loss = LossArguments()
    backend = _backend(stage, SOME, loss=loss)
    _step(stage, backend)
    batch = off_policy(batch_of(Case(UNEVEN, loss, ANYWHERE, equal_rewards=True, equal_group=2)))
    accumulate(backend, shard_of(stage, batch, FIXED))
    plain = AutoModelForCausalLM.from_pretrained(stage.model("untied"), dtype=torch.float64)
    targets = ["q_proj", "v_proj", "down_proj"]
    wrapped = get_peft_model(plain, LoraConfig(r=3, lora_alpha=8, target_modules=targets))
    own = {name.removeprefix("base_model.model."): p for name, p in wrapped.named_parameters()}
    for name, weight in _adapter(backend).items():
        own[name].data = weight.double()
    wanted_layers = {name for name in own if any(f".{target}.lora_" in name for target in targets)}
    assert _adapter(backend).keys() == wanted_layers
    total: Any = 0.0
    for i, tokens in enumerate(batch.tokens):
        current, _ = token_scores(wrapped, tokens, batch.response_lengths[i], TEMPERATURE)
        assert batch.old_log_probs is not None
        ratio = (current - torch.as_tensor(batch.old_log_probs[i]).double()).exp()
        advantage = float(batch.rewards[i])
        token_loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage)
        mask = torch.as_tensor(batch.loss_masks[i]).double()
        total = total + (token_loss * mask).sum() / float(batch.sample_denoms[i])
    (total / batch.num_trajectories).backward()
    for name, parameter in _parameters(backend).items():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        gradient, wanted = full(parameter.grad).double(), own[name].grad
        assert (gradient - wanted).norm() <= RELATIVE_ERROR * wanted.norm(), name


def export_is_the_sum_and_peft_reads_the_adapter(stage: Stage) -> None:
    backend = _backend(stage, SOME)
    _step(stage, backend)
    folder = stage.folder / f"adapter_export_{stage.world}"
    for _ in range(2):  # the second export replaces the files of the first
        backend.export_hf(folder)
    sent = {name: weight for chunk in backend.export_weights() for name, weight in chunk.tensors.items()}
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(stage.model("untied"), dtype=torch.float32)
    by_peft = PeftModel.from_pretrained(base, folder / "adapter")
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"] and config["r"] == 3
    assert config["base_model_name_or_path"] == stage.model("untied")
    shard = shard_of(stage, make_batch(KL), FIXED)
    tolerance = log_prob_error(merged, shard.batch.tokens, TEMPERATURE)
    policy = log_probs(backend, shard)
    for i, tokens in enumerate(shard.batch.tokens):
        for model in (merged, by_peft):
            result, _ = token_scores(model, tokens, shard.batch.response_lengths[i], TEMPERATURE)
            assert abs(result.detach().numpy() - policy[i]).max() < tolerance
    changed = {name for name, weight in _weights_on_disk(stage).items() if not torch.equal(weight, sent[name])}
    assert changed == {
        name for name in sent if any(f".{target}." in name for target in ("q_proj", "v_proj", "down_proj"))
    }
    assert all(torch.equal(sent[name], p) for name, p in merged.named_parameters())


def save_adapter_checkpoint(stage: Stage) -> None:
    """Save on two ranks, with dropout, and save the result of the steps after it."""
    backend = _backend(stage, replace(LORA, lora_dropout=0.3))
    _step(stage, backend)
    folder = stage.folder / "adapter_checkpoint"
    folder.mkdir(exist_ok=True)
    backend.save(folder, {"rollout": 1})
    saved = _adapter(backend)
    _step(stage, backend, seed=2)
    later = _adapter(backend)
    resumed = _backend(stage, replace(LORA, lora_dropout=0.3))
    state = resumed.load(folder)
    _step(stage, resumed, seed=2)
    again = _adapter(resumed)
    if stage.rank == 0:
        torch.save({"saved": saved, "later": later}, stage.folder / "adapter_wanted.pt")
    dist.barrier()
    assert state == {"rollout": 1}
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", ".metadata"} <= files
    in_tensors = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {key for key in in_tensors if key.startswith("model.")} == {f"model.{name}" for name in saved}
    assert all(".lora_" in key for key in in_tensors if key.startswith("optimizer.state."))
    assert later.keys() == again.keys() and all(torch.equal(again[name], weight) for name, weight in later.items())


def adapter_checkpoint_is_read_on_one_rank(stage: Stage) -> None:
    """Its adapter is equal bit for bit on another number of ranks, in peft's file, and in an export of one process."""
    wanted = torch.load(stage.folder / "adapter_wanted.pt")
    folder = stage.folder / "adapter_checkpoint"
    backend = _backend(stage)
    backend.load(folder)
    adapter = _adapter(backend)
    assert adapter.keys() == wanted["saved"].keys()
    in_file = load_file(adapter_folder(folder) / "adapter_model.safetensors")
    for name, weight in wanted["saved"].items():
        assert torch.equal(adapter[name], weight)
        assert torch.equal(in_file["base_model.model." + name.replace(".default", "")], weight)
    out = stage.folder / "adapter_exported"
    export(backend.settings, folder, out)
    sent = {name: weight for chunk in backend.export_weights() for name, weight in chunk.tensors.items()}
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.equal(sent[name], p) for name, p in exported.named_parameters())


def adapter_of_other_flags_is_refused(stage: Stage) -> None:
    folder = stage.folder / "adapter_checkpoint"
    whole = stage.folder / "checkpoint"  # of state_checks.py
    none = LoraArguments()
    for lora, path, words in (
        (replace(LORA, lora_rank=4), folder, "--lora-rank 3, not 4; give --lora-rank 3"),
        (replace(LORA, lora_alpha=4), folder, "--lora-alpha 8, not 4; give --lora-alpha 8"),
        (SOME, folder, "--target-modules down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj, not"),
        (none, folder, "holds an adapter, not all weights"),
        (LORA, whole, "holds all weights, and --lora-rank 3 trains an adapter"),
    ):
        message = error_of(ValueError, _backend(stage, lora, loss=LossArguments()).load, path)
        assert message.startswith("--load: ") and words in message, message


def layers_that_are_not_there_are_refused(stage: Stage) -> None:
    message = error_of(ValueError, _backend, stage, replace(LORA, target_modules=("q_proj", "qkv")))
    assert message.startswith("--target-modules qkv: a llama has no linear layer of this name; give some of down_proj")


CHECKS = (
    new_adapter_changes_no_log_prob,
    only_the_adapter_learns,
    gradient_is_that_of_peft,
    export_is_the_sum_and_peft_reads_the_adapter,
)
ON_TWO_RANKS = (save_adapter_checkpoint,)
AFTER_TWO_RANKS = (
    adapter_checkpoint_is_read_on_one_rank,
    adapter_of_other_flags_is_refused,
    layers_that_are_not_there_are_refused,
)
