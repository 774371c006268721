"""The configurations in an export."""

import json

import pytest
import torch
from tiny_kinds import config_of
from tiny_llama import tiny_llama
from transformers import AutoModelForCausalLM, GenerationConfig

from miles.training.fsdp.adapter import merged_weights
from miles.training.fsdp.checkpoint import export_hf
from miles.training.fsdp.models import load_model
from miles.training.one_process import one_rank

OF_GENERATION = {"eos_token_id": [1, 7], "temperature": 0.3}  # transformers reads this, and would not save it


def export(model, folder):
    with one_rank():
        export_hf(folder, model, merged_weights(model, torch.float32), torch.float32)


def test_settings_of_generation_are_exported_as_they_are(tmp_path):
    tiny_llama(seed=1).save_pretrained(tmp_path / "source")
    (tmp_path / "source/generation_config.json").write_text(json.dumps(OF_GENERATION))
    export(load_model(str(tmp_path / "source"), torch.float32), tmp_path / "export")
    config = GenerationConfig.from_pretrained(tmp_path / "export")
    assert {name: getattr(config, name) for name in OF_GENERATION} == OF_GENERATION


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_the_export_names_its_architecture(kind, tmp_path):
    """Servers choose their code by it; the config of a text model that is a part of another one names none."""
    AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(tmp_path / "source")
    config_of(kind).save_pretrained(tmp_path / "source")  # of the whole model
    model = load_model(str(tmp_path / "source"), torch.float32)
    export(model, tmp_path / "export")
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
