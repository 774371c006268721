"""Log-probs, conversion, optimizer, and the special cases of a step, on one layout."""

from __future__ import annotations

import gc
import json
import math
import runpy
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from batches import batch_of
from cases import ANYWHERE, BATCHES, Case, loss_of, without_loss_tokens
from compare import samples_of, wanted
from forked_ranks import error_of
from layouts import CPU, SIGMOID, TEMPERATURE, RankProcess, make_backend, models_of, plain_model, shard_of, weights
from megatron.core.transformer.moe import moe_utils
from oracle import token_scores
from safetensors.torch import load_file, save_file
from tolerance import FEW_ROUNDINGS, RELATIVE_ERROR, adam_error, log_prob_error
from transformers import AutoModelForCausalLM

from miles.config.lora import LoraArguments
from miles.engine.embedded.model_runner import ModelRunner
from miles.objective.settings import LossArguments
from miles.training import scoring
from miles.training.megatron import moe
from miles.training.megatron.backend import MegatronBackend
from miles.training.megatron.moe import expert_biases
from miles.training.trainer import Trainer
from miles.types.metrics import values
from miles.types.train_batch import TrainBatch, TrainShard

PLAIN = LossArguments(loss_canary="always")
CASE = Case(BATCHES["uneven"], PLAIN, ANYWHERE)

known_model = cache(plain_model)  # for checks that leave it unchanged


@cache
def _expected_log_probs(folder: Path, model: str) -> tuple[dict[tuple[int, ...], np.ndarray], float]:
    """Return transformers' log-probs of each sample of ``CASE``, by its tokens and the length of its response.

    The second value is the error that fp32 explains.
    """
    plain, batch = known_model(folder, model, torch.float64), batch_of(CASE)
    samples = [(tokens, n) for tokens, n in zip(batch.tokens, batch.response_lengths, strict=True)]
    scores = {_key(*sample): token_scores(plain, *sample, TEMPERATURE)[0].detach().numpy() for sample in samples}
    return scores, log_prob_error(plain, batch.tokens, TEMPERATURE)


def _key(tokens: Sequence[int], response: int) -> tuple[int, ...]:
    return (*map(int, tokens), response)


def compute_once(folder: Path, layouts: Iterable[str], whole: bool) -> None:
    """Compute the expected values for the ranks of several layouts, in the process that they are forked from."""
    checked = [name for name in layouts if name in (OF_LAYOUT if whole else BY_TURNS)]
    for model in sorted({model for name in checked for model in models_of(RankProcess(folder, name, 0, whole))}):
        _expected_log_probs(folder, model)
        known_model(folder, model, torch.float32)


def _train(backend: MegatronBackend, batch: TrainBatch) -> dict[str, Any]:
    trainer = Trainer(backend, backend.settings.loss, backend.settings.dims.token_ranks)
    return trainer.train([shard_of(backend, batch)])[0]


def log_probs(backend: MegatronBackend, shard: TrainShard, reference: bool = False) -> list[np.ndarray]:
    """Return the log-probs of policy or reference, computed by the production code."""
    model = backend.reference if reference else backend.policy
    assert model is not None
    return scoring.log_probs(backend, model, shard)


def log_probs_equal_transformers(process: RankProcess, models: Sequence[str] | None = None, mode: str = "raw") -> None:
    """Compare log-probs of every kind of model: fp32, in the order of the shard, on every rank."""
    batch = batch_of(CASE)
    for model in models or models_of(process):
        backend = make_backend(process, model, PLAIN, auxiliary={"megatron_to_hf_mode": mode})
        shard = shard_of(backend, batch, [i % 3 != 0 for i in range(len(batch))], watch_mass=False)
        _are_those_of_transformers(log_probs(backend, shard), shard, process, model)


def _are_those_of_transformers(
    log_probs: list[np.ndarray], shard: TrainShard, process: RankProcess, model: str
) -> None:
    scores, tolerance = _expected_log_probs(process.folder, model)
    for i, column in enumerate(log_probs):
        expected = scores[_key(shard.batch.tokens[i], shard.batch.response_lengths[i])]
        assert column.dtype == "float32" and abs(column - expected).max() < tolerance, model


def weights_come_back_exactly(process: RankProcess, models: Sequence[str] | None = None, mode: str = "raw") -> None:
    """Every tensor is exported bit for bit, into a folder that transformers reads."""
    ids = torch.arange(10)[None]
    for model in models or models_of(process):
        plain = known_model(process.folder, model, torch.float32)
        backend = make_backend(process, model, PLAIN, auxiliary={"megatron_to_hf_mode": mode})
        folder = process.folder / f"export of {process.name} {model}"
        backend.export_hf(folder)
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", experts_implementation="eager")
        assert exported.dtype == torch.float32
        tensors, expected = exported.state_dict(), plain.state_dict()
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], weight) for name, weight in expected.items()), model
        assert json.loads((folder / "generation_config.json").read_text()) == json.loads(
            (process.folder / model / "generation_config.json").read_text()
        )
        with torch.no_grad():
            assert torch.equal(exported(ids).logits, plain(ids).logits)


def engine_takes_the_weights(process: RankProcess) -> None:
    """The engine checks that it gets every tensor of its model; it then scores as the trainer does."""
    batch = batch_of(CASE)
    for model in models_of(process):
        backend = make_backend(process, model, PLAIN, **ADAM)
        _train(backend, batch)
        chunks = list(backend.export_weights())
        engine = ModelRunner(process.model(model), torch.float32, "cpu")
        engine.load_weights(chunks)
        shard = shard_of(backend, batch)
        scores = log_probs(backend, shard)
        i = int(np.argmax([len(column) for column in scores]))
        tokens, response = shard.batch.tokens[i], shard.batch.response_lengths[i]
        prompt = [int(token) for token in tokens[: len(tokens) - response]]
        first = engine.prefill([prompt], 0)[0].div(TEMPERATURE).log_softmax(-1)[tokens[len(prompt)]]
        tolerance = log_prob_error(known_model(process.folder, model, torch.float64), [tokens], TEMPERATURE)
        assert abs(float(first) - float(scores[i][0])) < 10 * tolerance, model


# The large epsilon keeps Adam from taking full steps on gradients that are only rounding errors.
ADAM: dict[str, Any] = dict(lr=1e-2, lr_decay_style="linear", weight_decay=0.1, clip_grad=0.05, adam_eps=1e-3)
# Of one element, clipped and over epsilon. Its share of the gradient's error is at most the whole.
GRADIENT_ERROR = RELATIVE_ERROR * ADAM["clip_grad"] / ADAM["adam_eps"]


def optimizer_is_adamw_with_clipping(process: RankProcess) -> None:
    """Compare three steps with torch.optim.AdamW and clip_grad_norm_ on the oracle's gradients, in one process."""
    backend = make_backend(process, "tied", PLAIN, **ADAM)
    plain = plain_model(process.folder, "tied", torch.float64).train()
    decayed = [p for p in plain.parameters() if p.ndim >= 2]
    others = [p for p in plain.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], eps=1e-3
    )
    for step in range(3):
        wanted(CASE, plain, samples_of(CASE))  # leaves its gradients in the model
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        for group in adam.param_groups:
            group["lr"] = 1e-2 * (1 - step / 10)
        adam.step()
        metrics = values(_train(backend, batch_of(CASE)))
        assert math.isclose(metrics["train/grad_norm"], norm.item(), rel_tol=RELATIVE_ERROR), f"step {step}"
        assert math.isclose(metrics["train/lr"], 1e-2 * (1 - step / 10))
        expected = dict(plain.named_parameters())
        error = adam_error(ADAM["lr"], step + 1, GRADIENT_ERROR)
        for name, tensor in weights(backend).items():
            wanted_weight = expected[name].detach().float()
            torch.testing.assert_close(tensor, wanted_weight, rtol=FEW_ROUNDINGS, atol=error, msg=name)


def step_without_loss_tokens_is_skipped(process: RankProcess) -> None:
    """With T = 0, under both contracts, weights and schedule stay, and the next step is the first."""
    spec = without_loss_tokens(CASE.spec)
    for loss in (PLAIN, loss_of("token_mean")):
        backend = make_backend(process, "untied", loss, **ADAM)
        before = weights(backend)
        metrics = _train(backend, batch_of(replace(CASE, spec=spec)))
        assert metrics["train/skipped_steps"].value == 1.0 and "train/loss" not in metrics
        after = weights(backend)
        assert all(torch.equal(before[n], after[n]) for n in before)
        assert _train(backend, batch_of(CASE))["train/lr"].value == 1e-2


def non_finite_gradient_leaves_the_weights(process: RankProcess) -> None:
    """A NaN on one rank stops every rank."""
    backend = make_backend(process, "untied", PLAIN)
    before = weights(backend)
    if process.rank == 0:
        backend.policy.distributed[0].buffers[0].grad_data[0] = (
            math.nan
        )  # as after a micro-batch, before the sum over ranks
    policy = Trainer(backend, backend.settings.loss, backend.settings.dims.token_ranks).policy
    policy.model.forward_backward(shard_of(backend, batch_of(CASE)), policy.loss_function)
    message = error_of(FloatingPointError, policy.optimizer.step)
    assert "--lr" in message and "step 0" in message
    after = weights(backend)
    assert all(torch.equal(before[n], after[n]) for n in before)


def reference_keeps_its_first_weights(process: RankProcess) -> None:
    loss = replace(PLAIN, use_kl_loss=True, kl_loss_coef=0.1)
    backend = make_backend(process, "untied", loss, **ADAM)
    shard = shard_of(backend, batch_of(CASE))
    start = log_probs(backend, shard)
    tolerance = log_prob_error(known_model(process.folder, "untied", torch.float32), shard.batch.tokens, TEMPERATURE)
    kl = [_train(backend, batch_of(CASE))["train/kl_loss"].value for _ in range(2)]
    assert abs(kl[0]) < tolerance and abs(kl[1]) > 1e-4  # k1: the mean difference of log-probs
    for column, expected in zip(log_probs(backend, shard, reference=True), start, strict=True):
        np.testing.assert_allclose(column, expected, rtol=0, atol=tolerance)


def reference_is_rotated_by_its_own_config(process: RankProcess) -> None:
    """Test a reference with the policy's shapes and an extended context."""
    policy = make_backend(process, "untied", PLAIN)
    shard = shard_of(policy, batch_of(CASE))
    model = replace(policy.settings.model, ref_load=process.model("llama3_rope"))
    settings = replace(policy.settings, model=model, loss=replace(PLAIN, use_kl_loss=True))
    reference = log_probs(MegatronBackend(settings, CPU, 10), shard, reference=True)
    _are_those_of_transformers(reference, shard, process, "llama3_rope")


def the_first_choice_of_experts_is_repeated(process: RankProcess) -> None:
    """``--use-routing-replay``: other biases would choose other experts, and change no weight of an expert."""
    for model in sorted({*SIGMOID, "six_glm4_moe_layers"} & set(process.layout.models)):
        backend = make_backend(process, model, PLAIN)
        backend.policy.records_experts = True
        shard = shard_of(backend, batch_of(CASE), watch_mass=False)
        first = log_probs(backend, shard)
        biases = [bias for chunk in backend.policy.stage.chunks for _, bias in expert_biases(chunk)]
        for number, bias in enumerate(biases):
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(number)))
        again = log_probs(backend, shard)
        assert all((a == b).all() for a, b in zip(first, again, strict=True)), model
        backend.policy.records_experts = False
        other = log_probs(backend, shard)
        assert max(abs(a - b).max() for a, b in zip(first, other, strict=True)) > 1e-3, model
        assert backend.policy._first_choices
        del shard
        gc.collect()
        assert not backend.policy._first_choices, "what is kept goes with its iteration"


def canary_is_found_among_small_parameters(process: RankProcess) -> None:
    """An adapter of rank 1 has parameters whose ranges in the gradient buffer are padded."""
    plain = make_backend(process, "untied", PLAIN)
    backend = MegatronBackend(replace(plain.settings, lora=LoraArguments(lora_rank=1)), CPU, 10)
    _train(backend, batch_of(CASE))


def other_tensors_than_the_config_says_are_refused(process: RankProcess) -> None:
    """Each is named: an embedding of another size, a matrix that would be repeated, a head with a tied embedding."""
    embedding, head, query = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.weight"
    for model, name, change in (
        ("untied", embedding, lambda tensor: tensor[:-6]),
        ("untied", embedding, lambda tensor: torch.cat([tensor, tensor])),
        ("untied", query, lambda tensor: tensor[:, :1]),
        ("tied", head, lambda tensor: tensor + 0.01),
    ):
        tensors = load_file(process.folder / model / "model.safetensors")
        tensors[name] = change(tensors[embedding if name == head else name]).contiguous()
        changed = f"{model} with another {name}"
        shutil.rmtree(process.folder / changed, ignore_errors=True)
        shutil.copytree(process.folder / model, process.folder / changed)
        save_file(tensors, process.folder / changed / "model.safetensors", {"format": "pt"})
        message = error_of(ValueError, make_backend, process, changed, PLAIN)
        assert message.startswith(f"--hf-checkpoint {process.model(changed)}: ") and name in message, message


def router_needs_no_transformer_engine(process: RankProcess) -> None:
    """On a GPU, where nothing of ``cpu_support`` is patched, the module of the router binds the name that it reads."""
    with patch.dict(moe_utils.__dict__):
        del moe_utils.te_general_gemm  # type: ignore[attr-defined]  # as Megatron 0.16 leaves it
        runpy.run_module(moe.__name__)
        tokens, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        moe_utils.router_gating_linear(tokens, weight, None, torch.float32).sum().backward()
    assert torch.allclose(weight.grad, tokens.detach().sum(0).expand(2, 4))  # type: ignore[arg-type]


CHECKS = (
    log_probs_equal_transformers,
    weights_come_back_exactly,
    optimizer_is_adamw_with_clipping,
    step_without_loss_tokens_is_skipped,
    non_finite_gradient_leaves_the_weights,
    reference_keeps_its_first_weights,
)
CONVERSION = (log_probs_equal_transformers, weights_come_back_exactly)
BY_TURNS = {
    "one": (
        *CONVERSION,
        reference_is_rotated_by_its_own_config,
        other_tensors_than_the_config_says_are_refused,
        router_needs_no_transformer_engine,
    ),
    "one, sigmoid": (*CONVERSION, engine_takes_the_weights, the_first_choice_of_experts_is_repeated),
    "dp2, distributed optimizer": (
        optimizer_is_adamw_with_clipping,
        non_finite_gradient_leaves_the_weights,
        canary_is_found_among_small_parameters,
    ),
    "tp2 with sp": CONVERSION,
    "pp2": CHECKS,
    "cp2": CONVERSION[:1],
    "ep2 with cp2": CONVERSION,
}
OF_LAYOUT = {
    "one": (
        *CHECKS,
        reference_is_rotated_by_its_own_config,
        other_tensors_than_the_config_says_are_refused,
        router_needs_no_transformer_engine,
    ),
    "dp2, distributed optimizer": (*CHECKS, canary_is_found_among_small_parameters),
    "tp2": CHECKS,
    "tp2 with sp": CONVERSION,
    "pp2": CHECKS,
    "pp2, uneven": CONVERSION,
    "pp3, interleaved": (*CONVERSION, engine_takes_the_weights, the_first_choice_of_experts_is_repeated),
    "cp2": CHECKS,
    "ep2": CONVERSION,
    "ep2 with cp2": CONVERSION,
    "tp2 with sp, ep2": CONVERSION,
    "tp2 with sp, ep2, experts cut": CONVERSION,
    "tp2 with sp, pp2": CONVERSION,
    "one, sigmoid": (*CONVERSION, engine_takes_the_weights, the_first_choice_of_experts_is_repeated),
    "tp2 with sp, ep2, sigmoid": (*CONVERSION, engine_takes_the_weights, the_first_choice_of_experts_is_repeated),
    "cp2 with ep2, sigmoid": (*CONVERSION, the_first_choice_of_experts_is_repeated),
    "pp2, dp2, sigmoid": (*CONVERSION, the_first_choice_of_experts_is_repeated),
}
