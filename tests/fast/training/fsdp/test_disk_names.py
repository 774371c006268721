"""Weights for servers and exports have the names and shapes of checkpoints, whatever transformers makes of them."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_kinds import config_of
from transformers import AutoModelForCausalLM

from miles.training.fsdp.adapter import merged_weights
from miles.training.fsdp.checkpoint import as_on_disk

ONE_EXPERT = {
    "qwen3_moe": "model.layers.0.mlp.experts.0.up_proj.weight",
    "glm4_moe": "model.layers.1.mlp.experts.0.up_proj.weight",
    "qwen3_next": "model.layers.0.mlp.experts.0.up_proj.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.0.w3.weight",
    "nemotron_h": "backbone.layers.3.mixer.experts.0.up_proj.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj",  # one tensor on disk too
    "llama": None,
}


@pytest.mark.parametrize("kind", ONE_EXPERT)
def test_what_is_sent_is_what_the_checkpoint_has(kind, tmp_path):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(kind))
    made.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    for model in (made, AutoModelForCausalLM.from_pretrained(tmp_path)):
        sent = list(as_on_disk(model, merged_weights(model, torch.float32)))
        assert len(sent) == len(wanted) and dict(sent).keys() == wanted.keys()
        assert all(torch.equal(weight, wanted[name]) for name, weight in sent)
        assert ONE_EXPERT[kind] is None or ONE_EXPERT[kind] in wanted
