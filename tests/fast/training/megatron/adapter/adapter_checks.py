"""A low-rank adapter on Megatron's layers, layout by layout: peft on a plain model is the oracle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import TestCase

import numpy as np
import torch
import torch.distributed as dist
from batches import batch_of
from cases import ANYWHERE, BATCHES, FULL, Case, loss_of
from compare import gradient_distance, norm_of, off_policy, samples_of, wanted
from conformance_checks import CONTRACTS
from forked_ranks import error_of
from layouts import CPU, TEMPERATURE, RankProcess, make_backend, plain_model, shard_of
from oracle import token_scores
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from state_checks import ADAM, CASE, PLAIN, _train, log_probs
from tolerance import RELATIVE_ERROR, log_prob_error

from miles.config.lora import LoraArguments
from miles.objective.settings import LossArguments
from miles.training.adapter_folder import adapter_folder
from miles.training.megatron.backend import MegatronBackend
from miles.training.trainer import Trainer
from miles.types.metrics import values

LORA = LoraArguments(lora_rank=3, lora_alpha=8)
SOME = replace(LORA, target_modules=("q_proj,v_proj", "down_proj"))
LATENT = ("deepseek_v3", "glm4_moe_lite")  # refused
IN_ATTENTION = replace(LORA, target_modules=("q_proj,v_proj", "o_proj"))
KL = replace(PLAIN, use_kl_loss=True, kl_loss_coef=0.1)


def _backend(
    process: RankProcess,
    model: str,
    lora: LoraArguments = LORA,
    loss: LossArguments = PLAIN,
    bf16: bool = False,
    **optimizer: Any,
) -> MegatronBackend:
    plain = make_backend(process, model, replace(loss, use_kl_loss=False, kl_loss_coef=0.0), **(optimizer or ADAM))
    training = replace(plain.settings.training, bf16=bf16)
    return MegatronBackend(replace(plain.settings, lora=lora, loss=loss, training=training), CPU, 10)


def _adapter(backend: MegatronBackend) -> dict[str, torch.Tensor]:
    adapter = backend.policy.stage.adapter
    assert adapter is not None
    return {name: tensor.clone() for name, tensor in adapter.whole(backend.ranks.pp)}


def _gradients(backend: MegatronBackend) -> dict[str, Any]:
    adapter = backend.policy.stage.adapter
    assert adapter is not None
    return {name: g.clone().numpy() for name, g in adapter.whole(backend.ranks.pp, lambda p: p.main_grad)}  # type: ignore[attr-defined]


def _models(process: RankProcess) -> Iterator[tuple[str, LoraArguments]]:
    """Yield the models of a layout that get adapters, each with two choices of layers."""
    for model in process.layout.models:
        if model in LATENT:
            continue
        some = IN_ATTENTION if "moe" in model else SOME
        yield from ((model, LORA), (model, some))


def _by_peft(process: RankProcess, model: str, backend: MegatronBackend) -> Any:
    """Return a plain model in float64 with the adapter of ``backend``, put there by peft."""
    tensors, lora, adapter = _adapter(backend), backend.settings.lora, backend.policy.stage.adapter
    assert adapter is not None
    plain = plain_model(process.folder, model, torch.float64).train()
    config = LoraConfig(r=lora.lora_rank, lora_alpha=lora.lora_alpha, target_modules=adapter.names)
    wrapped = get_peft_model(plain, config)
    own = dict(wrapped.named_parameters())
    for name, tensor in tensors.items():
        own[_of_peft(name)].data = tensor.double()
    assert {name for name in own if ".lora_" in name} == {_of_peft(name) for name in tensors}
    return wrapped


def _of_peft(name: str) -> str:
    return f"base_model.model.{name}.default.weight"


def _of_ours(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".default.weight")


def new_adapter_changes_no_log_prob(process: RankProcess) -> None:
    """B is 0: policy, reference and a frozen model without an adapter agree bit for bit, in fp32 and bf16.

    A model whose weights are trained may differ in the last bit: ``torch.matmul`` takes another kernel for these.
    """
    for model, lora in _models(process):
        for bf16 in (False, True):
            backend = _backend(process, model, lora, KL, bf16)
            none = _backend(process, model, LoraArguments(), PLAIN, bf16)
            for chunk in none.policy.stage.chunks:
                chunk.requires_grad_(False)
            shard = shard_of(backend, batch_of(CASE))
            policy, reference = log_probs(backend, shard), log_probs(backend, shard, reference=True)
            for column, base, expected in zip(policy, reference, log_probs(none, shard), strict=True):
                np.testing.assert_array_equal(column, expected)
                np.testing.assert_array_equal(base, expected)


def gradient_is_that_of_peft(process: RankProcess) -> str:
    """After B has moved away from 0: gradients under both contracts, and all metrics, equal the oracle's."""
    messages = []
    for model, lora in _models(process):
        for name, contract in CONTRACTS.items():
            backend = _backend(process, model, lora, contract)
            _train(backend, batch_of(CASE))
            oracle = _by_peft(process, model, backend)
            loss = loss_of("token_mean" if "tokens" in name else "prompt_mean", **FULL)
            case = off_policy(Case(BATCHES["masked"], loss, ANYWHERE, seed=3), oracle)
            gradients, metrics = wanted(case, oracle, samples_of(case))
            expected = {_of_ours(n): gradient for n, gradient in gradients.items() if ".lora_" in n}
            shard = shard_of(backend, batch_of(case))
            trainer = Trainer(backend, case.loss, backend.settings.dims.token_ranks)
            result: dict[str, Any] = {}
            step = trainer.policy.optimizer.step

            def recorded() -> Any:
                result.update(_gradients(backend))  # noqa: B023  # called within this pass
                return step()  # noqa: B023

            trainer.policy.optimizer.step = recorded  # type: ignore[method-assign]
            reported = {n.removeprefix("train/"): v for n, v in values(trainer.train([shard])[0]).items()}
            label = f"{model}, {name}, {','.join(lora.targets) or 'all'}"
            if not process.layout.sizes.use_distributed_optimizer:
                messages += [f"{label}: {line}" for line in gradient_distance(result, expected)[1]]
            metrics["grad_norm"] = norm_of(expected)
            for metric, number in metrics.items():
                if not abs(reported[metric] - number) <= RELATIVE_ERROR * max(abs(number), 0.05):
                    messages.append(f"{label}: {metric} {reported[metric]:.8g} for {number:.8g}")
    return "\n".join(messages)


def only_the_adapter_learns(process: RankProcess) -> None:
    """Two steps leave every other weight unchanged on disk, bit for bit, and the reference's log-probs too."""
    for model, lora in _models(process):
        for bf16, dtype in ((False, torch.float32), (True, torch.bfloat16)):
            backend = _backend(process, model, lora, KL, bf16)
            shard = shard_of(backend, batch_of(CASE))
            before, start = _adapter(backend), log_probs(backend, shard, reference=True)
            kl = [_train(backend, batch_of(CASE))["train/kl_loss"].value for _ in range(2)]
            assert kl[0] == 0.0 and kl[1] != 0.0
            after = _adapter(backend)
            assert not any(torch.equal(before[name], tensor) for name, tensor in after.items())
            exported = backend.converter.export(backend.policy.stage, lambda p: p.data, dtype)
            plain = plain_model(process.folder, model, dtype).state_dict()
            for name, weight in exported:
                if name in plain:  # transformers keeps the experts of a layer in one tensor
                    assert torch.equal(weight, plain[name].to(weight.dtype)), name
            for column, first in zip(log_probs(backend, shard, reference=True), start, strict=True):
                np.testing.assert_array_equal(column, first)


def export_is_the_sum_and_peft_reads_the_adapter(process: RankProcess) -> None:
    for model, lora in _models(process):
        backend = _backend(process, model, lora)
        _train(backend, batch_of(CASE))
        folder = process.folder / f"adapter of {process.name} {model} {len(lora.targets)}"
        backend.export_hf(folder)
        sent = {name: weight for chunk in backend.export_weights() for name, weight in chunk.tensors.items()}
        config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == process.model(model) and config["r"] == 3
        base = plain_model(process.folder, model, torch.float32)
        first = {name: weight.clone() for name, weight in base.state_dict().items()}
        by_peft = PeftModel.from_pretrained(base, folder / "adapter")
        merged = plain_model(process.folder, folder.name, torch.float32)
        shard = shard_of(backend, batch_of(CASE))
        policy = log_probs(backend, shard)
        tolerance = log_prob_error(merged, shard.batch.tokens, TEMPERATURE)
        for i, tokens in enumerate(shard.batch.tokens):
            for other in (merged, by_peft):
                result, _ = token_scores(other, tokens, shard.batch.response_lengths[i], TEMPERATURE)
                assert abs(result.detach().numpy() - policy[i]).max() < tolerance, (model, type(other))
        changed = {name for name, weight in first.items() if name in sent and not torch.equal(weight, sent[name])}
        assert changed == {f"{name.rpartition('.')[0]}.weight" for name in _adapter(backend)}


def saves_the_adapter(process: RankProcess) -> None:
    """Save with dropout; a resumed run takes the same step bit for bit, here and in ``reads_the_adapter``."""
    model, _ = next(_models(process))
    lora = replace(LORA, lora_dropout=0.3)
    backend = _backend(process, model, lora)
    _train(backend, batch_of(CASE))
    folder = _checkpoint(process)
    if process.rank == 0:
        folder.mkdir()
    dist.barrier()
    with TestCase().assertNoLogs("megatron.core", "WARNING"):  # as of a checkpoint that is overwritten
        backend.save(folder, {"rollout": 1})
    saved = _adapter(backend)
    _train(backend, batch_of(CASE))
    later = _adapter(backend)
    resumed = _backend(process, model, lora)
    assert resumed.load(folder) == {"rollout": 1}
    assert all(torch.equal(tensor, saved[name]) for name, tensor in _adapter(resumed).items())
    _train(resumed, batch_of(CASE))
    assert all(torch.equal(tensor, later[name]) for name, tensor in _adapter(resumed).items())
    in_file = load_file(adapter_folder(folder) / "adapter_model.safetensors")
    assert in_file.keys() == {f"base_model.model.{name}.weight" for name in saved}
    assert all(torch.equal(in_file[f"base_model.model.{name}.weight"], tensor) for name, tensor in saved.items())
    if process.rank == 0:
        torch.save({"model": model, "saved": saved}, folder.with_suffix(".pt"))


def _checkpoint(process: RankProcess) -> Path:
    return process.folder / f"adapter checkpoint of {process.name.replace(',', '')}"


def reads_the_adapter(process: RankProcess) -> None:
    """On one rank: what any layout has saved; other flags and whole checkpoints are refused."""
    for file in sorted(process.folder.glob("adapter checkpoint of *.pt")):
        wanted = torch.load(file)
        folder = file.with_suffix("")
        backend = _backend(process, wanted["model"])
        backend.load(folder)
        adapter = _adapter(backend)
        assert adapter.keys() == wanted["saved"].keys()
        assert all(torch.equal(tensor, wanted["saved"][name]) for name, tensor in adapter.items()), file.name
        assert backend.policy.optimizer.steps_done == 1
        for lora, words in (
            (replace(LORA, lora_rank=4), "--lora-rank 3, not 4; give --lora-rank 3"),
            (IN_ATTENTION, "--target-modules "),
            (LoraArguments(), "holds an adapter, not all weights"),
        ):
            message = error_of(ValueError, _backend(process, wanted["model"], lora).load, folder)
            assert message.startswith("--load: ") and words in message, message


def latent_attention_is_refused(process: RankProcess) -> None:
    message = error_of(ValueError, _backend, process, "deepseek_v3")
    assert message == (
        "--lora-rank 3: the latent attention of a deepseek_v3 gets no adapter with --train-backend megatron; "
        "use --train-backend fsdp"
    )


def layers_that_are_not_there_are_refused(process: RankProcess) -> None:
    message = error_of(ValueError, _backend, process, "untied", replace(LORA, target_modules=("q_proj", "qkv")))
    assert message.startswith("--target-modules qkv: the model has no linear layer of this name; give some of down_")


CHECKS = (
    new_adapter_changes_no_log_prob,
    gradient_is_that_of_peft,
    only_the_adapter_learns,
    export_is_the_sum_and_peft_reads_the_adapter,
    saves_the_adapter,
)
LAST = (reads_the_adapter, layers_that_are_not_there_are_refused, latent_attention_is_refused)
