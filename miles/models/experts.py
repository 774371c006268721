"""Layers with experts: the part that families share. A routed expert is a gated MLP of its own tensors.

Routing by sigmoid scores is that of DeepSeek-V3 (arXiv 2412.19437 §2.1.2). A bias per expert, which no gradient
reaches, is added to the scores when experts are chosen, within the groups of experts with the highest scores. The
weights of the chosen are their scores without bias, normalized and scaled. All tokens also go through shared experts.
"""

from __future__ import annotations

from typing import Any

from miles.models.base import Config, Shape, refusal
from miles.models.parameters import Binding
from miles.models.tensor_layouts import GateUp, Replicated, Split


def routed_experts() -> dict[str, Binding]:
    """Return the router's matrix and the experts of a layer."""
    experts, gate_up = "mlp.experts.local_experts.*", ("gate_proj", "up_proj")
    hf_gate_up = tuple(f"mlp.experts.*.{name}.weight" for name in gate_up)
    return {
        "mlp.router.weight": Binding(Replicated(), ("mlp.gate.weight",)),
        f"{experts}.linear_fc1.weight": Binding(GateUp(), hf_gate_up, is_expert=True),
        f"{experts}.linear_fc2.weight": Binding(Split(1), ("mlp.experts.*.down_proj.weight",), is_expert=True),
    }


def sigmoid_experts() -> dict[str, Binding]:
    """Return router, experts and shared experts of a layer."""
    shared = "mlp.shared_experts"
    gate_up = (f"{shared}.gate_proj.weight", f"{shared}.up_proj.weight")
    return routed_experts() | {
        "mlp.router.expert_bias": Binding(Replicated(), ("mlp.gate.e_score_correction_bias",), is_buffer=True),
        f"{shared}.linear_fc1.weight": Binding(GateUp(), gate_up),
        f"{shared}.linear_fc2.weight": Binding(Split(1), (f"{shared}.down_proj.weight",)),
    }


def sigmoid_shape(config: Config, has_experts: list[int]) -> Shape:
    """Return the fields of Megatron's ``TransformerConfig``. ``has_experts`` has a 1 for each layer with experts."""
    return {
        "num_moe_experts": config["n_routed_experts"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_router_pre_softmax": True,  # as launch scripts have it; without effect on sigmoid scores
        "moe_layer_freq": has_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",  # transformers computes scores in fp32 whatever the model's dtype
        "moe_router_num_groups": config["n_group"],
        "moe_router_group_topk": config["topk_group"],
        "moe_router_topk_scaling_factor": float(config["routed_scaling_factor"]),
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"],
    }


def check_sigmoid_router(config: Config) -> None:
    """Raise ``ValueError`` for a setting of the router that Megatron computes in another way than transformers."""
    topk, groups, chosen_groups = (config[name] for name in ("num_experts_per_tok", "n_group", "topk_group"))
    if config.get("scoring_func", "sigmoid") != "sigmoid":
        raise _refusal(config, "scoring_func", "sigmoid scores")
    if bool(config.get("norm_topk_prob", True)) != (topk > 1):
        raise _refusal(config, "norm_topk_prob", "weights that are normalized over two experts or more")
    if not config["n_shared_experts"]:
        raise _refusal(config, "n_shared_experts", "layers with shared experts")
    # transformers ranks groups by their two best experts, megatron-core by num_experts_per_tok / topk_group.
    if chosen_groups < groups and topk // chosen_groups != 2:
        what = f"groups of experts with num_experts_per_tok twice topk_group (here {chosen_groups})"
        raise _refusal(config, "num_experts_per_tok", what)


def _refusal(config: Config, name: str, what: str) -> ValueError:
    value: Any = config.get(name)
    return refusal(f"{name} {value}", f"--train-backend megatron computes {what} only")
