"""Every type of model in model_families/packing.py equals transformers; other types are compared at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import SHAPE
from transformers import AutoConfig, AutoModelForCausalLM

from miles.arguments.parallel import ParallelArguments
from miles.model_families.packing import PACKABLE, RECURRENT, has_recurrent_state, is_compared_by_test
from miles.training.fsdp.models import Policy, load_policy
from miles.training.fsdp.packing_check import (
    check_layout,
    check_untested_model,
    compare_with_transformers,
    layout_log_probs,
    own_log_probs,
)

PACKED, PADDED = ParallelArguments(), ParallelArguments(qkv_format="bshd")
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
SHARED = EXPERTS | dict(shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
SIGMOID = dict(
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
    n_shared_experts=1,
)
LATENT = SIGMOID | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8
)
MAMBA = dict(
    num_hidden_layers=4,
    layers_block_type=["mamba", "attention", "mlp", "moe"],
    mamba_num_heads=4,
    mamba_head_dim=8,
    ssm_state_size=8,
    n_groups=2,
    moe_shared_expert_intermediate_size=16,
    **SIGMOID,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "glm4": {},
    "glm4_moe": SIGMOID,
    "glm4_moe_lite": LATENT,
    "llama": {},
    "mistral": dict(sliding_window=None),
    "mixtral": EXPERTS | dict(sliding_window=None),
    "olmo2": {},
    "phi3": dict(sliding_window=None),
    "qwen2": {},
    "qwen2_moe": SHARED,
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "smollm3": {},
    "nemotron_h": MAMBA,
    "qwen3_5": dict(text_config=SHAPE | LINEAR),
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe": dict(text_config=SHAPE | LINEAR | SHARED),
    "qwen3_5_moe_text": LINEAR | SHARED,
    "qwen3_next": LINEAR | SHARED,
}
UNTESTED = {
    "starcoder2": dict(sliding_window=None),
    "jamba": SIGMOID,
    "lfm2": dict(layer_types=["conv", "full_attention"]),
}


def make_policy(folder: Path, kind: str, **given: Any) -> Policy:
    """A policy of random weights, loaded as a run does."""
    values = SHAPE | dict(initializer_range=0.2) | (CONFIGS | UNTESTED)[kind] | given
    if "text_config" in values:
        values = dict(text_config=values["text_config"] | dict(initializer_range=0.2))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values)).save_pretrained(folder)
    return load_policy(str(folder), temperature=0.8, chunk_size=5, dtype=torch.float32)


def largest_difference(policy: Policy, packed: bool) -> float:
    """Of any log-prob, from transformers."""
    with torch.no_grad():
        return (layout_log_probs(policy, "", packed) - own_log_probs(policy)).abs().max().item()


def test_every_listed_type_is_compared_here():
    assert sorted(CONFIGS) == sorted(PACKABLE + RECURRENT)
    assert not set(UNTESTED) & set(CONFIGS)


@pytest.mark.parametrize("kind", PACKABLE)
def test_packed_and_padded_equal_transformers(tmp_path, kind):
    policy = make_policy(tmp_path, kind)
    assert not has_recurrent_state(policy.language_model.config.to_dict())
    check_layout("--hf-checkpoint", str(tmp_path), PACKED)
    assert largest_difference(policy, packed=False) < 1e-4
    assert largest_difference(policy, packed=True) < 1e-4


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_state_equals_transformers_padded_and_is_found_packed(tmp_path, kind):
    policy = make_policy(tmp_path, kind)
    assert largest_difference(policy, packed=False) < 1e-4
    with pytest.raises(ValueError, match=r"depend on the samples that are packed before: .* add --qkv-format bshd$"):
        compare_with_transformers(policy, kind, PACKED)
    with pytest.raises(ValueError, match=rf"--ref-load .* a {kind}\w* has recurrent state, .*; add --qkv-format bshd$"):
        check_layout("--ref-load", str(tmp_path), PACKED)
    with pytest.raises(ValueError, match="drop --context-parallel-size and add --qkv-format bshd$"):
        check_layout("--ref-load", str(tmp_path), replace(PACKED, context_parallel_size=2))
    check_layout("--hf-checkpoint", str(tmp_path), PADDED)
    assert is_compared_by_test(policy.language_model.config.to_dict())


@pytest.mark.parametrize("kind", ["nemotron_h", "qwen3_5_text", "qwen3_next"])
def test_gradients_of_padded_rows_equal_transformers(tmp_path, kind):
    policy = make_policy(tmp_path, kind)
    parameters = [p for p in policy.language_model.parameters() if p.requires_grad]
    weights = torch.randn(17, generator=torch.Generator().manual_seed(0))

    def gradient(log_probs: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad((log_probs * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    wanted = gradient(own_log_probs(policy))
    error = (gradient(layout_log_probs(policy, "", packed=False)) - wanted).norm() / wanted.norm()
    assert error < 1e-5
    assert (gradient(layout_log_probs(policy, "", packed=True)) - wanted).norm() > 0.1 * wanted.norm()


def test_sparse_attention_is_refused_by_name(tmp_path):
    AutoConfig.for_model("glm_moe_dsa", **(SHAPE | LATENT)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^--ref-load .* a glm_moe_dsa has sparse attention.*; choose another model$"):
        check_layout("--ref-load", str(tmp_path), PADDED)


def test_other_types_are_compared_at_start(tmp_path):
    right = make_policy(tmp_path / "attention", "starcoder2")
    check_untested_model(right, "--hf-checkpoint", "right", PACKED, torch.device("cpu"))
    assert not right.language_model.training
    assert right.language_model.config._attn_implementation == "miles_packed"
    hidden = make_policy(tmp_path / "state", "jamba")  # its configuration has no list of layers
    assert not has_recurrent_state(hidden.language_model.config.to_dict())
    check_untested_model(hidden, "--hf-checkpoint", "hidden", PADDED, torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"^--hf-checkpoint hidden: .* jamba depend .* differ by \d.* add --qkv-format"
    ):
        check_untested_model(hidden, "--hf-checkpoint", "hidden", PACKED, torch.device("cpu"))
    conv = make_policy(tmp_path / "conv", "lfm2")
    assert has_recurrent_state(conv.language_model.config.to_dict())


def test_a_difference_from_transformers_is_refused_in_either_layout(tmp_path):
    policy = make_policy(tmp_path, "starcoder2")
    head = policy.language_model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, logits: 1.1 * logits)  # as models that scale their logits
    for parallel in (PACKED, PADDED):
        with pytest.raises(ValueError, match=r"are not those of transformers: on 17 tokens .*; choose another model$"):
            check_untested_model(policy, "--hf-checkpoint", "scaled", parallel, torch.device("cpu"))


def test_bfloat16_passes_and_still_finds_the_state(tmp_path):
    for kind in ("qwen3_moe", "qwen3_5_text"):
        make_policy(tmp_path / kind, kind)
    attention, recurrent = (
        load_policy(str(tmp_path / k), 1.0, -1, torch.bfloat16) for k in ("qwen3_moe", "qwen3_5_text")
    )
    compare_with_transformers(attention, "attention", PACKED)
    compare_with_transformers(recurrent, "recurrent", PADDED)
    with pytest.raises(ValueError, match="packed before"):
        compare_with_transformers(recurrent, "recurrent", PACKED)


@pytest.mark.parametrize("kind", ["qwen3_moe", "nemotron_h"])
def test_experts_may_have_any_width(tmp_path, kind):
    """torch's grouped product wants rows of 16 bytes."""
    policy = make_policy(tmp_path, kind, moe_intermediate_size=18)
    assert largest_difference(policy, packed=False) < 1e-4
    assert policy.language_model.config._experts_implementation == "eager"
    other = make_policy(tmp_path / "even", kind)
    assert other.language_model.config._experts_implementation != "eager"
