"""``--megatron-to-hf-mode bridge`` on real ranks: ``python bridge_checks.py FOLDER [LAYOUT...]``.

Models that miles converts itself must be equal bit for bit. The others are compared with transformers, with the float64
oracle and with their own files. FOLDER/results.json has the failures by layout and check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from miles.training.megatron.cpu_support import support_cpu

support_cpu()

import conformance_checks  # noqa: E402  # Megatron is imported from here on
import state_checks  # noqa: E402
import torch  # noqa: E402
from launch import Check, run_layout  # noqa: E402
from layouts import LLAMA3_ROPE, MODELS, RankProcess, make_backend, models_of, save_models, small, weights  # noqa: E402
from megatron.bridge import AutoBridge  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import GemmaConfig, MistralConfig, NemotronConfig, PretrainedConfig  # noqa: E402

from miles.objective.settings import LossArguments  # noqa: E402
from miles.training.megatron.bridge import bridge_shape, check_provider  # noqa: E402

# The layers of Nemotron square what they have: with larger weights fp32 is further from float64.
MILD = {"initializer_range": 0.08}
BRIDGED: dict[str, PretrainedConfig] = {
    "mistral": MistralConfig(**small(head_dim=16, sliding_window=None)),
    "nemotron": NemotronConfig(**small(head_dim=16) | MILD),
    "nemotron, tied": NemotronConfig(**small(tie_word_embeddings=True) | MILD),
}
LAYOUTS = ("one", "dp2, distributed optimizer", "tp2 with sp", "pp2", "tp2 with sp, pp2", "ep2")

NOT_COMPUTED: dict[str, Any] = {
    "window_size": [15, 0],
    "softmax_scale": 0.5,
    "qk_l2_norm": True,
    "rotary_interleaved": True,
    "rotary_percent": 0.5,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "transformer_layer_spec": print,
    "normalization": "LayerNorm",
    "layernorm_zero_centered_gamma": True,
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "hidden_dropout": 0.1,
    "position_embedding_type": "yarn",
    "vocab_size": 67,
}


def as_raw(process: RankProcess) -> str:
    """Compare every parameter of this rank and every exported tensor with ``raw``, for the models that it converts."""
    wrong = []
    for model in models_of(process):
        raw, bridge = (make_backend(process, model, LossArguments(), auxiliary=_mode(m)) for m in ("raw", "bridge"))
        held = [dict(backend.policy.stage.named_parameters()) for backend in (raw, bridge)]
        wrong += [f"{model} on this rank: {line}" for line in _differing(*held)]
        wrong += [f"{model} exported: {line}" for line in _differing(weights(raw), weights(bridge))]
    return "\n".join(wrong)


def _differing(wanted: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """Return the names that only one has, or whose numbers differ."""
    both = wanted.keys() & actual.keys()
    assert len(both) > 1
    return [*(wanted.keys() ^ actual.keys()), *(name for name in both if not torch.equal(wanted[name], actual[name]))]


def critic(process: RankProcess) -> str:
    """The critic has the policy's weights, except for its head."""
    loss = LossArguments(advantage_estimator="ppo")
    backend = make_backend(process, "nemotron, tied", loss, auxiliary=_mode("bridge"))
    assert backend.critic is not None
    held = [dict(model.named_parameters()) for model in (backend.policy.stage, backend.critic.stage)]
    for of in held:
        for own in ("canary", "value_head", "output_layer.weight"):
            of.pop(own, None)
    return "\n".join(_differing(*held))


def checkpoint(process: RankProcess) -> str:
    """Megatron's own format holds the bridged models too."""
    first, second = (make_backend(process, "nemotron", LossArguments(), auxiliary=_mode("bridge")) for _ in range(2))
    folder = process.folder / f"checkpoint of {process.name}"
    if process.rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    first.save(folder, {"launcher": 1})
    with torch.no_grad():
        for parameter in second.policy.parameters():
            parameter.zero_()
    assert second.load(folder)["launcher"] == 1
    return "\n".join(_differing(weights(first), weights(second)))


def what_is_not_computed(process: RankProcess) -> str:
    """Each setting that the layers do not compute is refused by its name."""
    mistral: dict[str, Any] = {"architectures": ["MistralForCausalLM"], "sliding_window": None}
    yarn = LLAMA3_ROPE | {"rope_type": "yarn"}
    refused: dict[str, PretrainedConfig] = {
        "sliding_window 16": MistralConfig(**small(**mistral | {"sliding_window": 16})),
        "rope_type yarn": MistralConfig(**small(**mistral, rope_parameters=yarn)),
        "model_type gemma": GemmaConfig(**small(architectures=["GemmaForCausalLM"])),
        "attention_bias": NemotronConfig(**small(architectures=["NemotronForCausalLM"], attention_bias=True)),
        "hidden_act silu": NemotronConfig(**small(architectures=["NemotronForCausalLM"], hidden_act="silu")),
    }
    tried: dict[str, Callable[[], Any]] = {name: partial(bridge_shape, config) for name, config in refused.items()}
    for name, value in NOT_COMPUTED.items():
        plain = MistralConfig(**small(**mistral))
        provider = AutoBridge.from_hf_config(plain).to_megatron_provider(load_weights=False)
        check_provider(provider, plain)
        setattr(provider, name, value)
        tried[name] = partial(check_provider, provider, plain)
    gemma = GemmaConfig(**small(architectures=["GemmaForCausalLM"]))
    of_its_own = AutoBridge.from_hf_config(gemma).to_megatron_provider(load_weights=False)
    tried["provider GemmaModelProvider"] = partial(check_provider, of_its_own, gemma)
    said = []
    for name, attempt in tried.items():
        try:
            said.append(f"{name}: accepted: {attempt()}")
        except ValueError as error:
            said += [f"{name}: {error}"] * (name not in str(error))
    return "\n".join(said)


def incomplete_checkpoints(process: RankProcess) -> str:
    """An extra tensor and a missing tensor are errors that name it."""
    said = []
    for wanted in ("model.layers.0.self_attn.q_proj.bias", "self_attention.linear_qkv.weight"):
        folder = Path(process.model("mistral"))
        tensors = load_file(folder / "model.safetensors")
        changed = dict(tensors)
        if wanted.endswith("bias"):
            changed[wanted] = torch.zeros(64)
        else:
            changed.pop("model.layers.1.self_attn.k_proj.weight")
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        try:
            make_backend(process, "mistral", LossArguments(), auxiliary=_mode("bridge"))
            said.append(f"{wanted}: accepted")
        except ValueError as error:
            said += [f"{wanted}: {error}"] * (wanted not in str(error))
        finally:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return "\n".join(said)


def _mode(name: str) -> dict[str, str]:
    return {"megatron_to_hf_mode": name}


def checks_of(layout: str, expected: dict[str, list[conformance_checks.Expected]]) -> dict[str, Check]:
    checks: dict[str, Check] = {"as raw": as_raw}
    if layout == "ep2":  # for models with experts
        return checks
    bridged: dict[str, Any] = {"models": tuple(BRIDGED), "mode": "bridge"}
    checks["log-probs"] = partial(state_checks.log_probs_equal_transformers, **bridged)
    checks["round trip"] = partial(state_checks.weights_come_back_exactly, **bridged)
    checks |= {"critic": critic, "checkpoint": checkpoint}
    if layout == "one":
        checks |= {"refused": what_is_not_computed, "incomplete": incomplete_checkpoints}
    for model in BRIDGED:
        for contract in conformance_checks.CONTRACTS:
            checks[f"{model}, {contract}"] = partial(
                conformance_checks.conforms, model=model, contract=contract, expected=expected[model], mode="bridge"
            )
    return checks


def main(folder: Path, names: list[str]) -> None:
    for models in (MODELS, BRIDGED):
        save_models(folder, models)
    oracle = conformance_checks.Oracle(folder)
    expected = {model: oracle.all_expected(model) for model in BRIDGED}
    results = {name: run_layout(folder, name, checks_of(name, expected)) for name in names or LAYOUTS}
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
