"""Which layers of a model with experts get an adapter, with the installed release of peft."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_kinds import config_of
from transformers import AutoModelForCausalLM, Glm4MoeConfig, PretrainedConfig, Qwen2MoeConfig

from miles.config.lora import LoraArguments
from miles.training.fsdp.adapter import adapted_layers, add_adapter, merged_weights, names_on_disk

SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
)
MODELS = (
    Glm4MoeConfig(**SMALL, n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1),
    Qwen2MoeConfig(**SMALL, num_experts=4, shared_expert_intermediate_size=16),
)
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: config.model_type)
def test_all_linear_leaves_experts_and_routers_out(config: PretrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    add_adapter(model, LoraArguments(lora_rank=3), seed=1)
    layers = {name.rpartition(".")[2] for name in adapted_layers(model)}
    assert layers >= set(ATTENTION) and not any(".experts" in name for name in adapted_layers(model))
    assert layers - set(ATTENTION) <= {"shared_expert_gate"}
    assert names_on_disk(model) == sorted(layers)
    merged = dict(merged_weights(model, torch.float32))
    assert merged.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in merged.items())


def test_an_indexer_gets_no_adapter() -> None:
    """No gradient would reach it, and a resumed run would miss the moments of its parameters."""
    model = AutoModelForCausalLM.from_config(config_of("glm_moe_dsa"))
    add_adapter(model, LoraArguments(lora_rank=3), seed=1)
    assert len(adapted_layers(model)) and not any(".indexer." in name for name in adapted_layers(model))
    again = AutoModelForCausalLM.from_config(config_of("glm_moe_dsa"))
    with pytest.raises(ValueError, match="--target-modules wq_b: a glm_moe_dsa has no linear layer of this name"):
        add_adapter(again, LoraArguments(lora_rank=3, target_modules=("q_b_proj,wq_b",)), seed=1)


def test_projections_of_experts_are_refused_when_the_model_is_built() -> None:
    """As for a model of a hub, whose config the validator has not read."""
    model = AutoModelForCausalLM.from_config(MODELS[0])
    with pytest.raises(ValueError, match="--target-modules q_proj,up_proj: up_proj of a model with experts"):
        add_adapter(model, LoraArguments(lora_rank=3, target_modules=("q_proj,up_proj",)), seed=1)
