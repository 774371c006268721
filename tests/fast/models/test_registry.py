"""A family is one file: found by the registry, read without torch, with layouts that are exact in both directions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.models import families as model_families
from miles.models.base import GateUp, QueryKeyValue, Replicated, Split, SwappedColumns, TensorLayout, Vocabulary
from miles.models.registry import BRIDGED, CONVERTED, check_bridged, converted_family, families, megatron_shape

CONFIG = dict(
    num_hidden_layers=4,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=66,
    max_position_embeddings=128,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)
SIGMOID = dict(
    n_routed_experts=4, n_shared_experts=2, n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5
)
YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
LATENT = SIGMOID | dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=8,
    rope_scaling=YARN,
)
OF_KIND = {"glm4_moe": SIGMOID, "deepseek_v3": LATENT, "kimi_k2": LATENT, "glm4_moe_lite": LATENT}


def config_of(kind: str) -> dict[str, Any]:
    return CONFIG | OF_KIND.get(kind, {}) | {"model_type": kind}


def test_models_that_are_known() -> None:
    sigmoid = ["deepseek_v3", "kimi_k2", "glm4_moe", "glm4_moe_lite"]
    assert list(CONVERTED) == [*sigmoid, "llama", "qwen2", "qwen3", "qwen3_moe"]
    assert list(BRIDGED) == ["mistral", "nemotron"]


def test_a_new_file_is_a_new_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else names it."""
    source = "from miles.models.families.llama import Llama\nCONVERTED = (Llama('olive', has_qk_norm=True),)\n"
    (tmp_path / "olive.py").write_text(source)
    monkeypatch.setattr(model_families, "__path__", [*model_families.__path__, str(tmp_path)])
    try:
        by_name = families("CONVERTED")
    finally:
        sys.modules.pop("miles.models.olive", None)
    assert set(by_name) - set(CONVERTED) == {"olive"}
    assert by_name["olive"].shape(CONFIG)["qk_layernorm"] is True


def test_configs_are_read_without_torch() -> None:
    """Validation reads them at once, also where torch takes seconds to import."""
    program = (
        "import sys\n"
        "sys.modules['torch'] = sys.modules['numpy'] = sys.modules['transformers'] = None\n"
        "from miles.models.registry import CONVERTED, megatron_shape\n"
        f"configs = {[config_of(kind) for kind in CONVERTED]!r}\n"
        "for config in configs:\n"
        "    shape = megatron_shape(config)\n"
        "    names = CONVERTED[config['model_type']].parameters(config, shape)\n"
        "    names.binding('decoder.layers.3.mlp.linear_fc1.weight')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "hf_names"),
    [
        ("llama", "embedding.word_embeddings.weight", ["model.embed_tokens.weight"]),
        ("llama", "output_layer.weight", ["lm_head.weight"]),
        (
            "qwen2",
            "decoder.layers.12.self_attention.linear_qkv.bias",
            [f"model.layers.12.self_attn.{x}_proj.bias" for x in "qkv"],
        ),
        ("qwen3", "decoder.layers.0.self_attention.k_layernorm.weight", ["model.layers.0.self_attn.k_norm.weight"]),
        (
            "qwen3_moe",
            "decoder.layers.3.mlp.experts.local_experts.10.linear_fc1.weight",
            [f"model.layers.3.mlp.experts.10.{x}_proj.weight" for x in ("gate", "up")],
        ),
        ("glm4_moe", "decoder.layers.1.mlp.router.expert_bias", ["model.layers.1.mlp.gate.e_score_correction_bias"]),
        (
            "deepseek_v3",
            "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
            [f"model.layers.1.mlp.shared_experts.{x}_proj.weight" for x in ("gate", "up")],
        ),
        (
            "kimi_k2",
            "decoder.layers.0.self_attention.linear_kv_down_proj.weight",
            ["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"],
        ),
        ("llama", "mtp.layers.1.eh_proj.weight", ["model.mtp_layers.1.input_proj.weight"]),
        ("llama", "mtp.layers.1.mtp_model_layer.mlp.linear_fc2.weight", ["model.mtp_layers.1.mlp.down_proj.weight"]),
    ],
)
def test_names(kind: str, name: str, hf_names: list[str]) -> None:
    config = config_of(kind)
    binding = converted_family(config).parameters(config, megatron_shape(config)).binding(name)
    assert list(binding.hf_names) == hf_names
    assert binding.is_expert == (".local_experts." in name)
    assert binding.is_buffer == name.endswith("expert_bias")


def test_the_shape_of_a_latent_model() -> None:
    shape = megatron_shape(config_of("deepseek_v3"))
    assert shape["multi_latent_attention"] and shape["moe_layer_freq"] == [0, 1, 1, 1]
    assert (shape["rope_type"], shape["rotary_scaling_factor"], shape["mscale_all_dim"]) == ("yarn", 40.0, 1.0)
    assert shape["moe_shared_expert_intermediate_size"] == 32
    plain = megatron_shape(config_of("glm4_moe_lite") | {"rope_scaling": None, "mlp_layer_types": ["sparse"] * 4})
    assert plain["rope_type"] == "rope" and plain["moe_layer_freq"] == [1, 1, 1, 1]


def test_a_parameter_without_a_name_is_an_error() -> None:
    config = CONFIG | {"model_type": "llama"}
    names = converted_family(config).parameters(config, megatron_shape(config))
    for name in ("decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.linear_fc1.bias", "canary"):
        with pytest.raises(AssertionError, match="has no Hugging Face name"):
            names.binding(name)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (Replicated(), [(8,)]),
        (Split(0), [(8, 4)]),
        (Split(1), [(4, 8)]),
        (SwappedColumns(), [(8, 6)]),
        (Vocabulary(7), [(7, 4)]),
        (GateUp(), [(8, 4), (8, 4)]),
        (QueryKeyValue(heads=8, groups=4, width=2), [(16, 3), (8, 3), (8, 3)]),
        (QueryKeyValue(heads=8, groups=2, width=2), [(16,), (4,), (4,)]),
    ],
)
def test_layouts_are_exact_in_both_directions(layout: TensorLayout, shapes: list[tuple[int, ...]], size: int) -> None:
    """The shards of any number of ranks make the same tensors again, and have one shape."""
    whole = [torch.randn(shape) for shape in shapes]
    shards = [layout.from_hf(whole, rank, size) for rank in range(size)]
    assert len({shard.shape for shard in shards}) == 1
    tensors = layout.to_hf(shards)
    assert all(torch.equal(f, w) for f, w in zip(tensors, whole, strict=True))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (dict(model_type="gemma"), ["model_type gemma", "llama, qwen2, qwen3, qwen3_moe"]),
        (dict(model_type="glm_moe_dsa"), ["model_type glm_moe_dsa", "llama, qwen2, qwen3, qwen3_moe"]),
        (dict(model_type="llama", quantization_config={"quant_method": "fp8"}), ["quantized weights", "in bf16"]),
        (config_of("deepseek_v3") | dict(norm_topk_prob=False), ["norm_topk_prob False", "normalized"]),
        (config_of("deepseek_v3") | dict(num_experts_per_tok=3), ["num_experts_per_tok 3", "twice topk_group"]),
        (config_of("deepseek_v3") | dict(rope_interleave=False), ["rope_interleave false"]),
        (config_of("kimi_k2") | dict(num_key_value_heads=2), ["num_key_value_heads 2", "each of the 4 heads"]),
        (config_of("kimi_k2") | dict(rope_scaling={"type": "dynamic"}), ["rope_type dynamic", "default and yarn"]),
        (config_of("glm4_moe") | dict(n_shared_experts=0), ["n_shared_experts 0", "shared experts"]),
        (
            dict(model_type="mistral"),
            ["--megatron-to-hf-mode bridge, or give --train-backend fsdp, which trains a mistral"],
        ),
        (
            dict(model_type="foo"),
            ["deepseek_v3, kimi_k2, glm4_moe", "with --megatron-to-hf-mode bridge, mistral, nemotron"],
        ),
        (dict(model_type="llama", hidden_act="gelu"), ["hidden_act gelu", "only silu"]),
        (dict(model_type="llama", mlp_bias=True), ["mlp_bias True", "MLPs without bias"]),
        (dict(model_type="qwen3", attention_bias=True), ["attention_bias", "no bias of a qwen3"]),
        (
            dict(model_type="qwen2", use_sliding_window=True, sliding_window=16),
            ["sliding_window 16", "full attention", "fsdp"],
        ),
        (dict(model_type="llama", logits_scaling=2.0), ["logits_scaling 2.0", "plain logits"]),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(config: dict[str, object], told: list[str]) -> None:
    with pytest.raises(ValueError, match="--hf-checkpoint: its config has") as error:
        megatron_shape(CONFIG | config)
    assert all(words in str(error.value) for words in told), error.value


@pytest.mark.parametrize("kind", ["gpt_oss", "glm_moe_dsa", "deepseek_v32", "nemotron_h", "qwen3_next", "gemma3_text"])
def test_a_family_that_only_fsdp_trains_is_refused_with_the_way_there(kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"model_type {kind}, .*; give --train-backend fsdp, which trains a {kind}, and"
    ):
        megatron_shape(CONFIG | dict(model_type=kind))


def test_a_bridged_model_needs_its_architecture() -> None:
    nemotron = CONFIG | dict(model_type="nemotron", hidden_act="relu2")
    check_bridged(nemotron | {"architectures": ["NemotronForCausalLM"]})
    with pytest.raises(ValueError, match="architectures None"):
        check_bridged(nemotron)
    with pytest.raises(ValueError, match=r"model_type glm4_moe, .* drop --megatron-to-hf-mode bridge: miles converts"):
        check_bridged(config_of("glm4_moe"))
