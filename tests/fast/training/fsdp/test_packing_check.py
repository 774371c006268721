"""Every type of model in models/packing.py equals transformers; other types are compared at start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_kinds import CONFIGS, UNTESTED, WINDOWS, config_of
from tiny_llama import SHAPE
from tolerance import KIND_LOG_PROB_ERROR, RELATIVE_ERROR
from transformers import AutoConfig, AutoModelForCausalLM

from miles.config.parallel import ParallelArguments
from miles.models.packing import (
    PACKABLE,
    RECURRENT,
    SPARSE,
    WINDOWED,
    has_recurrent_state,
    is_compared_by_test,
    must_be_padded,
)
from miles.training.fsdp.models import Policy, load_model
from miles.training.fsdp.packing_check import (
    check_layout,
    check_untested_model,
    compare_with_transformers,
    layout_log_probs,
    own_log_probs,
)
from miles.training.packed_attention import PackedLayout

PACKED, PADDED = ParallelArguments(), ParallelArguments(qkv_format="bshd")


def make_policy(folder: Path, kind: str, **fields: Any) -> Policy:
    """A policy of random weights, loaded as a run does."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config_of(kind, **(dict(initializer_range=0.2) | fields))).save_pretrained(folder)
    return Policy(load_model(str(folder), torch.float32), 0.8, 5)


def largest_difference(policy: Policy, packed: bool) -> float:
    """Of any log-prob, from transformers."""
    with torch.no_grad():
        return (layout_log_probs(policy, "", packed) - own_log_probs(policy)).abs().max().item()


def test_every_listed_type_is_compared_here():
    assert sorted(CONFIGS) == sorted(PACKABLE + RECURRENT)
    assert not set(UNTESTED) & set(CONFIGS)


@pytest.mark.parametrize("kind", PACKABLE + RECURRENT)
def test_packed_and_padded_equal_transformers(tmp_path, kind):
    policy = make_policy(tmp_path, kind)
    config = policy.language_model.config.to_dict()
    assert has_recurrent_state(config) == (kind in RECURRENT)
    assert is_compared_by_test(config)
    for layout in (PACKED, PADDED):
        check_layout("--hf-checkpoint", str(tmp_path), layout)
    assert largest_difference(policy, packed=False) < KIND_LOG_PROB_ERROR
    assert largest_difference(policy, packed=True) < KIND_LOG_PROB_ERROR


@pytest.mark.parametrize("kind", RECURRENT + SPARSE)
def test_gradients_equal_transformers_in_either_layout(tmp_path, kind):
    policy = make_policy(tmp_path, kind)
    parameters = [p for p in policy.language_model.parameters() if p.requires_grad]
    weights = torch.randn(17, generator=torch.Generator().manual_seed(0))

    def gradient(log_probs: torch.Tensor) -> torch.Tensor:
        parts = torch.autograd.grad((log_probs * weights).sum(), parameters, allow_unused=True, materialize_grads=True)
        return torch.cat([part.flatten() for part in parts])

    wanted = gradient(own_log_probs(policy))
    for packed in (False, True):
        error = (gradient(layout_log_probs(policy, "", packed)) - wanted).norm() / wanted.norm()
        assert error < RELATIVE_ERROR


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_shorter_than_samples_equal_transformers(tmp_path, kind):
    policy = make_policy(tmp_path, kind, **WINDOWS.get(kind, {}))
    check_layout("--hf-checkpoint", str(tmp_path), PACKED)
    parameters = list(policy.language_model.parameters())
    weights = torch.randn(17, generator=torch.Generator().manual_seed(0))

    def gradient(log_probs: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.flatten() for part in torch.autograd.grad((log_probs * weights).sum(), parameters)])

    own = own_log_probs(policy)
    wanted = gradient(own)
    for packed in (False, True):
        actual = layout_log_probs(policy, "", packed)
        assert (actual - own).abs().max() < KIND_LOG_PROB_ERROR
        assert (gradient(actual) - wanted).norm() < RELATIVE_ERROR * wanted.norm()
    with patch.object(PackedLayout, "narrowed", lambda self, window: None):
        assert (layout_log_probs(policy, "", packed=True) - own).abs().max() > 0.1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (
            "phi3",
            dict(
                original_max_position_embeddings=11,
                max_position_embeddings=64,
                rope_parameters=dict(
                    rope_type="longrope",
                    rope_theta=10000.0,
                    short_factor=[1.0] * 4,
                    long_factor=[4.0, 5.0, 6.0, 7.0],
                    original_max_position_embeddings=11,
                ),
            ),
        ),
        (
            "llama",
            dict(max_position_embeddings=11, rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)),
        ),
    ],
)
def test_a_sample_that_would_change_the_positions_of_others_is_refused(tmp_path, kind, fields):
    """Of the three samples, of 10, 13 and 5 tokens, the second is too long; with 13 positions none is."""
    policy = make_policy(tmp_path / "short", kind, **fields)
    for packed in (True, False):
        with pytest.raises(
            ValueError, match=r"^a sample has 13 tokens, .*position_embeddings 11 .* give --rollout-max-"
        ):
            layout_log_probs(policy, "", packed)
    policy._longest = None
    assert largest_difference(policy, packed=True) > 1e-2, "the others' log-probs are not theirs alone"
    longer = json.loads(json.dumps(fields).replace("11", "13"))
    assert largest_difference(make_policy(tmp_path / "long", kind, **longer), packed=True) < KIND_LOG_PROB_ERROR


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("seed_oss", dict(attention_dropout=0.1, residual_dropout=0.1)),
        ("phi3", dict(resid_pdrop=0.1, embd_pdrop=0.1)),
        ("mixtral", dict(router_jitter_noise=0.1)),
    ],
)
def test_training_computes_what_scoring_does_and_exports_the_config_as_it_was(tmp_path, kind, noise):
    policy = make_policy(tmp_path, kind, **noise)
    policy.train()
    for packed in (True, False):
        assert largest_difference(policy, packed) < KIND_LOG_PROB_ERROR
    assert policy.language_model.config.to_dict().items() >= noise.items()


def test_dropout_that_is_left_is_found(tmp_path):
    """As of layers that read its rate from the configuration in every pass."""
    policy = make_policy(tmp_path, "starcoder2")
    compare_with_transformers(policy, "--hf-checkpoint", PACKED)
    policy.language_model.model.layers[0].residual_dropout = 0.5
    policy.language_model.model.layers[0].self_attn.residual_dropout = 0.5
    with pytest.raises(ValueError, match=r"starcoder2 differ between training and scoring: .* set its dropout to 0"):
        compare_with_transformers(policy, "--hf-checkpoint", PACKED)


def test_a_state_that_passes_from_sample_to_sample_is_found(tmp_path):
    policy = make_policy(tmp_path, "qwen3_next")
    for module in policy.language_model.modules():
        vars(module).pop("forward", None)  # the layers as transformers has them
    compare_with_transformers(policy, "unchanged", PADDED)
    with pytest.raises(ValueError, match=r"depend on the samples that are packed before: .* add --qkv-format bshd$"):
        compare_with_transformers(policy, "unchanged", PACKED)


@pytest.mark.parametrize("kind", ["qwen3_next", "glm_moe_dsa"])
def test_ranks_do_not_share_sequences_that_layers_need_whole(tmp_path, kind):
    config_of(kind).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"^--ref-load .* needs? whole sequences; drop --context-parallel-size, "):
        check_layout("--ref-load", str(tmp_path), replace(PACKED, context_parallel_size=2))


def test_a_recurrent_type_that_no_test_compares_must_be_padded(tmp_path):
    config_of("lfm2").save_pretrained(tmp_path)
    assert must_be_padded(AutoConfig.from_pretrained(tmp_path).to_dict())
    with pytest.raises(ValueError, match=r"--ref-load .* a lfm2 has recurrent state, .*; add --qkv-format bshd$"):
        check_layout("--ref-load", str(tmp_path), PACKED)
    check_layout("--ref-load", str(tmp_path), PADDED)


@pytest.mark.parametrize(
    ("kind", "fields", "fault"),
    [
        (
            "qwen3",
            dict(quantization_config={"quant_method": "fp8"}),
            "quantized weights are not trained; give a folder",
        ),
        ("gemma2", {}, "config of a gemma2 sets attn_logit_softcapping, which --train-backend fsdp does not"),
        ("starcoder2", dict(sliding_window=4), r"a sliding window \(of 4 tokens\) has not been compared"),
    ],
)
def test_what_is_not_trained_is_refused_when_the_model_is_read(tmp_path, kind, fields, fault):
    """Of a name on a hub, validation may not know the configuration."""
    config = AutoConfig.for_model(kind, **SHAPE).to_dict() | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    for flag in ("--hf-checkpoint", "--ref-load"):
        with pytest.raises(ValueError, match=f"^{flag} {tmp_path}: .*{fault}"):
            check_layout(flag, str(tmp_path), PACKED)


@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_attention_chooses_among_the_keys_of_a_sample(tmp_path, kind):
    """With as many keys as there are, attention is dense, and the indexer is not run."""
    policy = make_policy(tmp_path / "sparse", kind)
    dense = make_policy(tmp_path / "dense", kind, index_topk=13)
    assert all(map(torch.equal, policy.state_dict().values(), dense.state_dict().values()))
    for packed in (False, True):
        with torch.no_grad():
            chosen, everything = (layout_log_probs(p, "", packed) for p in (policy, dense))
        assert (chosen - everything).abs().max() > 0.01
        with patch("miles.training.packed_attention._chosen", side_effect=AssertionError):
            layout_log_probs(dense, "", packed)
            with pytest.raises(AssertionError):
                layout_log_probs(policy, "", packed)
    assert {name for name, p in policy.named_parameters() if not p.requires_grad} == {
        name for name, _ in policy.named_parameters() if ".indexer." in name
    }


def test_other_types_are_compared_at_start(tmp_path):
    right = make_policy(tmp_path / "attention", "starcoder2")
    check_untested_model(right, "--hf-checkpoint", "right", PACKED, torch.device("cpu"))
    assert not right.language_model.training
    assert right.language_model.config._attn_implementation == "miles_packed"
    hidden = make_policy(tmp_path / "state", "jamba")
    assert has_recurrent_state(
        hidden.language_model.config.to_dict()
    )  # it has no list of layers: by transformers' source
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
        with pytest.raises(ValueError, match=r"differ from transformers': on 17 tokens .*; choose another model$"):
            check_untested_model(policy, "--hf-checkpoint", "scaled", parallel, torch.device("cpu"))


def test_bfloat16_passes_and_still_finds_the_state(tmp_path):
    for kind in ("qwen3_moe", "qwen3_5_text"):
        make_policy(tmp_path / kind, kind)
        compare_with_transformers(Policy(load_model(str(tmp_path / kind), torch.bfloat16), 1.0, -1), kind, PACKED)
    make_policy(tmp_path / "state", "jamba")
    with pytest.raises(ValueError, match="packed before"):
        compare_with_transformers(Policy(load_model(str(tmp_path / "state"), torch.bfloat16), 1.0, -1), "state", PACKED)


@pytest.mark.parametrize("kind", ["qwen3_moe", "nemotron_h"])
def test_experts_may_have_any_width(tmp_path, kind):
    """torch's grouped product wants rows of 16 bytes."""
    policy = make_policy(tmp_path, kind, moe_intermediate_size=18)
    assert largest_difference(policy, packed=False) < KIND_LOG_PROB_ERROR
    assert policy.language_model.config._experts_implementation == "eager"
    other = make_policy(tmp_path / "even", kind)
    assert other.language_model.config._experts_implementation != "eager"
