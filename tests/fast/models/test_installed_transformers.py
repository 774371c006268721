"""Facts that are read from transformers' source agree with its classes."""

import pytest

from miles.models.packing import PACKABLE, RECURRENT, WITH_TEXT_MODEL
from miles.models.reading import linear_layers, why_not_loaded


def test_what_tests_compare_with_transformers_is_loaded():
    kinds = [*PACKABLE, *RECURRENT, *WITH_TEXT_MODEL, "kimi_k2", "gpt2", "gpt-sw3"]
    assert not [kind for kind in kinds if why_not_loaded(kind, has_own_code=True, is_decoder=False)]
    assert why_not_loaded("bert", has_own_code=False, is_decoder=True) is None
    for kind in ("bart", "whisper"):
        assert why_not_loaded(kind, has_own_code=True, is_decoder=True)[0] == f"a {kind} has an encoder and a decoder"


def test_linear_layers_of_conditional_attributes_and_of_other_names():
    assert {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"} < linear_layers("deepseek_v3")
    assert linear_layers("kimi_k2") == linear_layers("deepseek_v3")
    assert linear_layers("phi3") == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert linear_layers("unknown") == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in (*PACKABLE, *RECURRENT) if kind != "ministral"])  # has no default
def test_every_linear_layer_of_a_model_is_found(kind):
    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind).get_text_config()
    config.num_hidden_layers = min(config.num_hidden_layers, 4)
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[: config.num_hidden_layers])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert named and {name.split(".")[-1] for name in named} <= linear_layers(kind)
