"""A shrunk configuration is small and keeps the features of its family."""

import pytest

from miles.models.tiny import shrunk_config

QWEN3 = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_window_layers=36,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
QWEN3_MOE = QWEN3 | dict(
    model_type="qwen3_moe",
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
DEEPSEEK_V3 = QWEN3 | dict(
    model_type="deepseek_v3",
    num_key_value_heads=32,
    head_dim=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
    moe_intermediate_size=2048,
    num_nextn_predict_layers=1,
    quantization_config={"quant_method": "fp8"},
)
GLM4_MOE = QWEN3 | dict(
    model_type="glm4_moe",
    partial_rotary_factor=0.5,
    attention_bias=True,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=3,
    moe_intermediate_size=1408,
)
QWEN3_NEXT = QWEN3_MOE | dict(
    model_type="qwen3_next",
    num_key_value_heads=2,
    num_attention_heads=16,
    shared_expert_intermediate_size=512,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 9,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
    partial_rotary_factor=0.25,
)
LLAMA = {name: value for name, value in QWEN3.items() if name not in ("head_dim", "max_window_layers")}
LLAMA |= dict(model_type="llama", num_key_value_heads=32, rope_scaling={"rope_type": "llama3", "factor": 8.0})
LLAMA["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# As transformers saves a Gemma 4: the last layer has wider heads, and half of the layers have no keys of their own.
GEMMA4 = dict(
    model_type="gemma4_text",
    vocab_size=262144,
    vocab_size_per_layer_input=64,
    hidden_size=1536,
    hidden_size_per_layer_input=256,
    intermediate_size=6144,
    num_hidden_layers=12,
    num_attention_heads=8,
    num_key_value_heads=1,
    head_dim=256,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 2,
    sliding_window=512,
    num_kv_shared_layers=6,
    per_layer_config={"05": {"head_dim": 512}, "11": {"head_dim": 512}},
)

FAMILIES = {
    config["model_type"]: config
    for config in (
        QWEN3,
        QWEN3 | {"model_type": "qwen2", "use_sliding_window": False},
        QWEN3 | {"model_type": "mistral", "sliding_window": 4096},
        QWEN3_MOE,
        QWEN3_NEXT,
        DEEPSEEK_V3,
        DEEPSEEK_V3 | {"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
        DEEPSEEK_V3 | {"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense"] + ["sparse"] * 35},
        GEMMA4,
        GLM4_MOE,
        LLAMA,
    )
}
FAMILIES["llama of 9 heads and 3 keys"] = LLAMA | dict(  # SmolLM2-135M
    hidden_size=576, num_attention_heads=9, num_key_value_heads=3, head_dim=64, num_hidden_layers=30
)


def test_what_matters_stays():
    dense, latent, mixed = shrunk_config(LLAMA), shrunk_config(DEEPSEEK_V3), shrunk_config(QWEN3_NEXT)
    assert dense["num_attention_heads"] == dense["num_key_value_heads"], "no grouped queries"
    assert dense["rope_scaling"] == LLAMA["rope_scaling"] and dense["vocab_size"] == LLAMA["vocab_size"]
    odd = shrunk_config(FAMILIES["llama of 9 heads and 3 keys"])
    assert odd["num_attention_heads"] == 6 and odd["hidden_size"] % 6 == 0, "three queries share a key"
    assert (latent["first_k_dense_replace"], latent["num_hidden_layers"]) == (1, 2), "a dense layer, then experts"
    assert (latent["n_group"], latent["topk_group"], latent["n_shared_experts"]) == (2, 1, 1)
    assert "quantization_config" not in latent and latent["num_nextn_predict_layers"] == 0
    assert mixed["layer_types"] == ["linear_attention", "full_attention"]
    alike = QWEN3 | {"layer_types": ["indexed_attention"] * 36, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 33}
    assert shrunk_config(alike)["mlp_layer_types"] == ["dense", "sparse"], "the first layer that has experts"
    plain = shrunk_config(QWEN3 | {"layer_types": ["full_attention"] * 36})
    assert plain["layer_types"] == ["full_attention"] * 2
    assert shrunk_config({"text_config": QWEN3, "model_type": "x"})["text_config"]["num_hidden_layers"] == 2


@pytest.mark.parametrize("form", ["of each layer", "of a kind of layer"])
def test_layers_with_other_heads_stay_so(form):
    config = dict(GEMMA4)
    if form == "of a kind of layer":  # as files on the hub have it
        config |= {"global_head_dim": 512, "num_global_key_value_heads": None}
        del config["per_layer_config"]
    small = shrunk_config(config)
    assert small["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert small["num_kv_shared_layers"] == 2, "a layer of each kind with keys, and one without"
    if form == "of each layer":
        assert small["per_layer_config"] == {"1": {"head_dim": 32}, "3": {"head_dim": 32}}
    else:
        assert (small["global_head_dim"], small["num_global_key_value_heads"]) == (32, None)
    assert small["head_dim"] == 16


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_it(family, tmp_path):
    """The model computes a finite loss and gradient, and has fewer than a million parameters without embeddings."""
    check_tiny(shrunk_config(FAMILIES[family]) | {"vocab_size": 64}, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
        ("qwen3_5_moe_text", {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4}),
        ("gpt_oss", {"layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4}),
        ("nemotron_h", {"num_hidden_layers": 4, "n_routed_experts": 4}),
        ("deepseek_v32", {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4}),
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "sparse"], "n_routed_experts": 4}),
    ],
)
def test_transformers_runs_a_family_at_the_size_that_it_has_by_default(family, kinds, tmp_path):
    from transformers import AutoConfig

    small = shrunk_config(AutoConfig.for_model(family).to_dict()) | {"vocab_size": 64}
    assert {name: small[name] for name in kinds} == kinds
    check_tiny(small | {name: 0 for name in small if name.endswith("token_id")}, tmp_path)


def check_tiny(config, folder):
    import torch
    from transformers import AutoModelForCausalLM

    from miles.models.tiny import write_model

    write_model(config, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(12).view(1, 12)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert torch.isfinite(loss) and model.num_parameters() < 1_000_000
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if ".indexer." not in name)
